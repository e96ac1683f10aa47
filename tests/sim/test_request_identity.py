"""What sets requests apart: every dimension keeps both tiers apart where it differs, and shares where it is equal."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.sim.engine import Group, SimEngine
from ucmcache.connector import identity
from ucmcache.connector.identity import Adapters, identify

PROMPT = list(range(45))
RESUMABLE_TOKENS = 40
TIERS = {"blocks": [Group("full", 8)], "states": [Group("full", 8), Group("state", 8)]}
HOST = {"host": {"blocks": "4MiB", "snapshots": "4MiB"}}
IMAGE = "0123456789abcdef" * 4


@dataclass(frozen=True)
class Asked:
    """All that tells one request from another."""

    tokens: tuple[int, ...] = tuple(PROMPT)
    salt: str | None = None
    lora: tuple[str, str] | None = None  # name and folder, below the test's own
    lora_id: int = 1
    reload: bool = False
    images: tuple[tuple[str, int, int], ...] = ()  # identifier, offset, length
    embeds: float | None = None

    def submit(self, engine: SimEngine, request_id: str, folder: Path) -> None:
        """Queue the request, as vLLM's front end would hand it over."""
        import torch
        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        from tests.sim.engine import Tokens

        lora = None
        if self.lora is not None:
            name, adapter = self.lora
            lora = LoRARequest(name, self.lora_id, str(folder / adapter), load_inplace=self.reload)
        request = Request(
            request_id,
            None if self.embeds is not None else list(self.tokens),
            SamplingParams(max_tokens=4, temperature=0, ignore_eos=True),
            None,
            prompt_embeds=None if self.embeds is None else torch.full((len(self.tokens), 4), self.embeds),
            mm_features=[
                MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))
                for identifier, offset, length in self.images
            ],
            lora_request=lora,
            cache_salt=self.salt,
            block_hasher=engine._hasher,
        )
        engine.requests[request_id] = request
        engine.tokens[request_id] = Tokens()
        engine.outputs[request_id] = []
        engine.scheduler.add_request(request)


@dataclass(frozen=True)
class Seen:
    """What one request found and left."""

    adopted_tokens: int
    saved_blocks: int
    saved_states: int


@dataclass
class Bench:
    """An engine, and the folder of its adapters."""

    engine: SimEngine
    folder: Path
    asked: int = 0

    def ask(self, asked: Asked) -> Seen:
        names = ("adopted_tokens", "saved_blocks", "saved_states")
        before = [self.engine.counts.get(name, 0) for name in names]
        self.asked += 1
        asked.submit(self.engine, f"r{self.asked}", self.folder)
        self.engine.run()
        assert len(self.engine.outputs[f"r{self.asked}"]) == 4
        assert self.engine.reset_local()
        return Seen(*(self.engine.counts.get(name, 0) - old for name, old in zip(names, before, strict=True)))


def write_adapter(folder: Path, content: bytes) -> None:
    """An adapter with given weights; sizes and times are the same whatever the content."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(content.ljust(64, b"\0"))
    for path in folder.iterdir():
        os.utime(path, ns=(10**18, 10**18))


def open_bench(model: Path, folder: Path, groups: Sequence[Group], extra: Mapping[str, Any]) -> Bench:
    """An engine with room for images, and two adapters."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    for name in ("a", "b"):
        write_adapter(folder / name, name.encode())
    engine = SimEngine(groups, model, extra, max_step_tokens=8)
    engine.scheduler.max_num_encoder_input_tokens = 1 << 20
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=1 << 20)
    return Bench(engine, folder)


@pytest.fixture(params=list(TIERS))
def bench(request: pytest.FixtureRequest, hybrid: Path, plain: Path, tmp_path: Path) -> Iterator[Bench]:
    """Once without and once with recurrent states."""
    opened = open_bench(hybrid if request.param == "states" else plain, tmp_path, TIERS[request.param], HOST)
    yield opened
    opened.engine.close()


@pytest.fixture
def talks(hybrid: Path, tmp_path: Path) -> Iterator[Bench]:
    """With sessions, and blocks that no prompt fills: what sets them apart is all in the tail."""
    groups = [Group("full", 64), Group("state", 64)]
    opened = open_bench(hybrid, tmp_path, groups, {**HOST, "sessions": {"entries": 8}})
    yield opened
    opened.engine.close()


BASE = Asked()
LORA = Asked(lora=("one", "a"))
MM = Asked(images=((IMAGE, 1, 5),))
CHANGES: dict[str, tuple[Asked, Asked]] = {
    "first token": (BASE, Asked(tokens=(49, *PROMPT[1:]))),
    "salt or none": (BASE, Asked(salt="a")),
    "salts": (Asked(salt="a"), Asked(salt="b")),
    "adapter or none": (BASE, LORA),
    "adapter's name": (LORA, Asked(lora=("two", "a"))),
    "adapter's path": (LORA, Asked(lora=("one", "b"), lora_id=2)),
    "image or none": (BASE, MM),
    "image's first digit": (MM, Asked(images=(("f" + IMAGE[1:], 1, 5),))),
    "image's last digit": (MM, Asked(images=((IMAGE[:-1] + "0", 1, 5),))),
    "image's offset": (MM, Asked(images=((IMAGE, 2, 5),))),
    "an image more": (MM, Asked(images=((IMAGE, 1, 5), (IMAGE[::-1], 6, 2)))),
}
EQUAL: dict[str, tuple[Asked, Asked]] = {
    "tokens": (BASE, BASE),
    "no salt": (BASE, Asked(salt="")),
    "salt": (Asked(salt="a"), Asked(salt="a")),
    "adapter": (LORA, LORA),
    "adapter under another id": (LORA, Asked(lora=("one", "a"), lora_id=7)),
    "adapter loaded again": (LORA, replace(LORA, reload=True)),
    "image": (MM, MM),
    "all of them": (replace(MM, salt="a", lora=("one", "a")), replace(MM, salt="a", lora=("one", "a"))),
}


@pytest.mark.parametrize("what", list(CHANGES))
def test_requests_that_differ_share_nothing(bench: Bench, what: str) -> None:
    one, other = CHANGES[what]
    first = bench.ask(one)
    assert first.saved_blocks == RESUMABLE_TOKENS // 8 + 1  # with the block that the output filled
    assert (first.saved_states > 0) == (len(bench.engine.groups) > 1)
    assert bench.ask(other) == first  # found nothing, and was kept whole beside the other
    for again in (one, other):
        assert bench.ask(again) == Seen(RESUMABLE_TOKENS, 0, 0)


@pytest.mark.parametrize("what", list(EQUAL))
def test_equal_requests_share_all(bench: Bench, what: str) -> None:
    one, other = EQUAL[what]
    assert bench.ask(one).adopted_tokens == 0
    assert bench.ask(other) == Seen(RESUMABLE_TOKENS, 0, 0)


def further(asked: Asked) -> Asked:
    """The next turn of a conversation, whose template wrote the answer anew."""
    return replace(asked, tokens=(*asked.tokens, 7, 8))


@pytest.mark.parametrize("what", list(CHANGES))
def test_conversations_that_differ_share_nothing(talks: Bench, what: str) -> None:
    one, other = CHANGES[what]
    assert talks.ask(one).adopted_tokens == 0
    assert talks.ask(further(other)).adopted_tokens == 0
    assert talks.ask(further(one)).adopted_tokens == len(PROMPT)


@pytest.mark.parametrize("what", list(EQUAL))
def test_equal_conversations_go_on(talks: Bench, what: str) -> None:
    one, other = EQUAL[what]
    assert talks.ask(one).adopted_tokens == 0
    assert talks.ask(further(other)).adopted_tokens == len(PROMPT)


def test_what_comes_before_a_difference_is_shared(bench: Bench) -> None:
    """Images and tokens set apart only what follows them."""
    bench.ask(BASE)
    for asked in (
        Asked(tokens=(*PROMPT[:26], 49, *PROMPT[27:])),
        Asked(images=((IMAGE, 26, 5),)),
        Asked(images=((IMAGE, 27, 5),)),
    ):
        assert bench.ask(asked).adopted_tokens == 24


@pytest.mark.parametrize("embeds", [0.0, 1.0])
def test_prompt_embeddings_are_passed_by(bench: Bench, embeds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither looked up nor kept, and no other request finds what they computed."""
    coordinator = bench.engine.side.coordinator
    lookup = Mock(wraps=coordinator.lookup)
    monkeypatch.setattr(coordinator, "lookup", lookup)
    asked = Asked(embeds=embeds)
    assert [bench.ask(asked), bench.ask(asked)] == [Seen(0, 0, 0)] * 2
    assert lookup.call_count == 0
    assert bench.ask(Asked(tokens=(0,) * len(PROMPT))).adopted_tokens == 0  # what the engine calls their tokens
    assert lookup.call_count == 1


def test_replaced_adapter_bytes_are_not_served_from_old_ones(bench: Bench) -> None:
    """Field case A15: same name, same path, same sizes and times, other weights."""
    first = bench.ask(LORA)
    write_adapter(bench.folder / "a", b"trained on")
    assert bench.ask(replace(LORA, reload=True)) == first
    write_adapter(bench.folder / "a", b"a")
    assert bench.ask(replace(LORA, reload=True)) == Seen(RESUMABLE_TOKENS, 0, 0)
    (bench.folder / "a" / "adapter_config.json").write_text('{"r": 9}')
    assert bench.ask(replace(LORA, lora_id=2)) == first


def test_an_adapter_replaced_under_a_running_engine_is_passed_by(bench: Bench) -> None:
    """The engine goes on with the bytes that it read once, so the files no longer say what it computes with."""
    bench.ask(LORA)
    write_adapter(bench.folder / "a", b"trained on")
    assert bench.ask(LORA) == Seen(0, 0, 0)
    write_adapter(bench.folder / "a", b"a")
    assert bench.ask(LORA) == Seen(0, 0, 0)  # it may have read the others meanwhile
    assert bench.ask(replace(LORA, reload=True)) == Seen(RESUMABLE_TOKENS, 0, 0)
    assert bench.ask(LORA) == Seen(RESUMABLE_TOKENS, 0, 0)


def test_an_adapter_that_is_no_local_folder_is_passed_by(bench: Bench) -> None:
    asked = Asked(lora=("one", "nowhere"))
    assert [bench.ask(asked), bench.ask(asked)] == [Seen(0, 0, 0)] * 2


# -- hashes ------------------------------------------------------------------------------------------------------------


def test_each_digit_of_an_image_hash_counts(bench: Bench) -> None:
    firsts = set()
    for at in range(len(IMAGE)):
        digit = "f" if IMAGE[at] != "f" else "e"
        Asked(images=((IMAGE[:at] + digit + IMAGE[at + 1 :], 1, 5),)).submit(bench.engine, f"d{at}", bench.folder)
        firsts.add(bytes(bench.engine.requests[f"d{at}"].block_hashes[0]))
    assert len(firsts) == len(IMAGE)
    bench.engine.run()


Hashes = Callable[[], Sequence[bytes]]


@pytest.fixture
def adapted(tmp_path: Path) -> tuple[list[bytes], Hashes]:
    """The engine's hashes of one request with an adapter, and ours of it."""
    write_adapter(tmp_path / "a", b"a")
    engine_hashes: list[bytes] = []
    lora = SimpleNamespace(lora_path=str(tmp_path / "a"), lora_int_id=1)
    hashes, _, bypass = identify(SimpleNamespace(lora_request=lora, block_hashes=engine_hashes), Adapters())
    assert not bypass
    return engine_hashes, hashes


def test_hashes_grow_with_the_engines(adapted: tuple[list[bytes], Hashes]) -> None:
    engine_hashes, hashes = adapted
    assert list(hashes()) == []
    engine_hashes += [b"1", b"2"]
    first = list(hashes())
    engine_hashes.append(b"3")
    assert list(hashes())[:2] == first
    assert len({*hashes(), *engine_hashes}) == 6


@pytest.mark.parametrize("after", [[b"1"], [b"1", b"x"], [b"1", b"2", b"x"], [b"1", b"x", b"y", b"z"], []])
def test_hashes_that_the_engine_takes_back_are_taken_back(
    adapted: tuple[list[bytes], Hashes], after: list[bytes]
) -> None:
    """A streaming session drops its last sampled token, and with it the hash of that token's block."""
    engine_hashes, hashes = adapted
    engine_hashes += [b"1", b"2", b"3"]
    before = list(hashes())
    engine_hashes[:] = after
    kept = sum(old == new for old, new in zip(after, [b"1", b"2", b"3"], strict=False))
    assert list(hashes())[:kept] == before[:kept]
    assert len(hashes()) == len(after)
    assert not {*hashes()} & {*before[kept:]}


def test_an_adapter_is_read_again_only_when_its_files_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_adapter(tmp_path / "a", b"a")
    now_ns = (tmp_path / "a" / "adapter_config.json").stat().st_ctime_ns
    adapters = Adapters(clock_ns=lambda: now_ns)
    read = Mock(wraps=identity.file_fingerprint)
    monkeypatch.setattr(identity, "file_fingerprint", read)

    def count(folder: Path) -> int:
        read.reset_mock()
        adapters.fingerprint(str(folder))
        return read.call_count

    # Fresh files may still change within what the file system's times can tell.
    assert [count(tmp_path / "a"), count(tmp_path / "a")] == [2, 2]
    now_ns += 60 * 10**9
    assert [count(tmp_path / "a"), count(tmp_path / "a")] == [2, 0]
    os.utime(tmp_path / "a" / "adapter_config.json")
    assert count(tmp_path / "a") == 2
