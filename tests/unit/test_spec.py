"""The spec table against the installed vLLM: every spec class is covered by name or refused by name."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ucmcache.coordinator.binding import BoundRow, GroupFacts, bind
from ucmcache.coordinator.coordinator import Coordinator
from ucmcache.coordinator.hit import Prompt, grid_tokens, resolve_hit
from ucmcache.coordinator.spec import REFUSALS, SPEC_TABLE, AccessUnit, Kind, SpecRow, Tokens, register
from ucmcache.errors import ConfigError, UnsupportedModelError
from ucmcache.store.arena import ArenaPlan, Presence
from ucmcache.store.block import BlockStore
from ucmcache.store.snapshot import SnapshotStore

# Classes of which vLLM makes no group of layers: bases, and the wrapper whose layers have classes of their own.
NOT_OF_A_LAYER = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}


def spec_classes() -> dict[str, type[Any]]:
    """Every spec class of the installed vLLM, by name."""
    interface = importlib.import_module("vllm.v1.kv_cache_interface")
    return {
        name: value
        for name, value in vars(interface).items()
        if inspect.isclass(value) and issubclass(value, interface.KVCacheSpec) and name not in NOT_OF_A_LAYER
    }


def facts(group: int, spec_class: str, block_tokens: int = 8, **options: Any) -> GroupFacts:
    spec = SimpleNamespace(sliding_window=20, extra_retained_tokens=0, attention_chunk_size=16)
    return GroupFacts(group, spec_class, block_tokens, spec, **{"content": "layers", **options})


def test_every_spec_class_is_covered_or_refused() -> None:
    """A vLLM with a new class fails here, until somebody has decided what the class needs."""
    assert set(spec_classes()) == set(SPEC_TABLE) | set(REFUSALS)
    assert not set(SPEC_TABLE) & set(REFUSALS)


def test_no_spec_class_of_vllm_is_elsewhere() -> None:
    """In none of its files, imported or not: a platform or a model may define one of its own."""
    known = {*spec_classes(), *NOT_OF_A_LAYER}
    base = re.compile(rf"class\s+\w+\([^)]*\b({'|'.join(known)})\b")
    found = set()
    for file in Path(importlib.import_module("vllm").__path__[0]).rglob("*.py"):
        text = file.read_text(errors="replace")
        classes = (
            [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)] if base.search(text) else []
        )
        for node in classes:
            if {ast.unparse(one).rpartition(".")[2] for one in node.bases} & known:
                found.add(node.name)
    assert found == known - {"KVCacheSpec"}


def test_what_the_engine_registers_is_covered_or_refused() -> None:
    """All classes that have a manager once a platform has registered its own, and all that exist by then."""
    registry = importlib.import_module("vllm.v1.kv_cache_spec_registry")
    registry.KVCacheSpecRegistry._ensure_registered()
    registered = {class_.__name__ for class_ in registry._REGISTRY_KVCACHESPEC_LIST}
    assert {"MambaSpec", "HiSparseHotSpec"} <= registered <= set(SPEC_TABLE) | set(REFUSALS)
    todo, alive = [importlib.import_module("vllm.v1.kv_cache_interface").KVCacheSpec], set()
    while todo:
        todo += (subclasses := todo.pop().__subclasses__())
        alive |= {class_.__name__ for class_ in subclasses if class_.__module__.startswith("vllm.")}
    assert alive == set(SPEC_TABLE) | set(REFUSALS) | (NOT_OF_A_LAYER - {"KVCacheSpec"})


def test_every_role_of_a_group_is_known() -> None:
    """A role brings a manager of its own: vLLM's are HiSparse's, whose engines are refused by other groups."""
    roles = importlib.import_module("vllm.v1.kv_cache_interface").KVCacheGroupRole
    assert {role.value for role in roles} == {"default", "hisparse_source", "hisparse_indexer"}


def test_sink_tokens_are_still_in_blocks_of_requests() -> None:
    """Why SinkFullAttentionSpec is refused. Where vLLM sets these blocks aside, it needs a row instead."""
    from tests.connector.test_layout import attention

    sink_tokens, block_tokens = 16, 8
    pool = importlib.import_module("vllm.v1.core.block_pool").BlockPool(8, True, block_tokens)
    managers = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
    made = managers.SinkFullAttentionManager(
        attention("SinkFullAttentionSpec", sink_len=sink_tokens),
        block_pool=pool,
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=block_tokens,
    )
    given = {block.block_id for block in made.allocate_new_blocks("request", 3 * block_tokens, 3 * block_tokens)}
    # StaticSinkAttention reads the sinks from block 1 on.
    assert given & set(range(1, 1 + sink_tokens // block_tokens))


def test_what_cannot_be_kept_is_refused_in_one_error_with_the_reason_or_the_row_to_add() -> None:
    names = [*SPEC_TABLE, *REFUSALS, "NewSpec"]
    with pytest.raises(UnsupportedModelError) as error:
        bind([facts(i, name, 16 + i) for i, name in enumerate(names)])
    first, *lines = str(error.value).splitlines()
    assert "ucmcache.coordinator.spec.SPEC_TABLE" in first
    assert len(lines) == len(REFUSALS) + 1
    for i, (line, name) in enumerate(zip(lines, names[len(SPEC_TABLE) :], strict=True), len(SPEC_TABLE)):
        assert f"group {i} ({name}" in line
        if name in REFUSALS:
            assert line.endswith(f"): {REFUSALS[name]}")
            assert ";" in REFUSALS[name]  # the reason; what to do
        else:
            assert f', {16 + i} tokens a block); add: SpecRow("NewSpec", Kind.' in line


@pytest.mark.parametrize("name", list(REFUSALS))
def test_a_refused_class_is_refused_although_the_engine_does_not_keep_it(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=name):
        bind([facts(0, name, cacheable=False)])


def test_the_row_that_the_error_names_is_the_remedy() -> None:
    row = SpecRow("NewSpec", Kind.CHAIN, "a test", reach=SPEC_TABLE["FullAttentionSpec"].reach)
    [bound] = bind([facts(0, "NewSpec")], {**SPEC_TABLE, "NewSpec": row})
    assert bound.spec is row


def test_a_group_in_a_host_pool_of_the_engine_is_refused() -> None:
    from tests.connector.test_layout import attention, group_of
    from ucmcache.connector.layout import group_facts

    spec = attention("MLAAttentionSpec")
    bind([group_facts(0, group_of(spec))])
    with pytest.raises(UnsupportedModelError, match="HiSparse"):
        bind([group_facts(0, group_of(spec, host_resident=True))])


# -- rows that are wrong ----------------------------------------------------------------------------------------------


def whole(p: Tokens, figures: Mapping[str, int]) -> Tokens:
    return np.zeros_like(p)


def row_with(**changes: Any) -> SpecRow:
    return SpecRow(**{"spec_class": "NewSpec", "kind": Kind.CHAIN, "why": "a test", "reach": whole, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spec_class": "New Spec"}, "name of a class"),
        ({"why": " "}, "why must say"),
        ({"kind": "none", "reach": None}, "kind must be a Kind"),
        ({"rank_rule": "union"}, "rank_rule must be a RankRule"),
        ({"access_unit": "window"}, "access_unit must be an AccessUnit"),
        ({"figures": "window_tokens"}, "figures must be a tuple of names"),  # as with a forgotten comma
        ({"reach": 0}, "reach must be a function"),
        ({"reach": None}, "a CHAIN row needs reach"),
        ({"kind": Kind.SNAPSHOT}, "only a CHAIN row has reach"),
        ({"kind": Kind.NONE}, "only a CHAIN row has reach"),
        ({"kind": Kind.SNAPSHOT, "reach": None, "figures": ("window",)}, "figures are what reach reads"),
        ({"access_unit": AccessUnit.WINDOW}, "needs the figures of its window"),
        ({"kind": Kind.SNAPSHOT, "reach": None, "access_unit": AccessUnit.FOLLOWER, "source": "X"}, "moves a ROW"),
        ({"kind": Kind.NONE, "reach": None, "access_unit": AccessUnit.FOLLOWER}, "names its source"),
        ({"source": "FullAttentionSpec"}, "only a FOLLOWER has a source"),
        ({"access_unit": AccessUnit.FOLLOWER, "source": "FullAttentionSpec"}, "its kind is NONE"),
        (
            {"kind": Kind.NONE, "reach": None, "access_unit": AccessUnit.FOLLOWER, "source": "NewSpec"},
            "its own source",
        ),
    ],
)
def test_a_row_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"the row for '{changes.get('spec_class', 'NewSpec')}'.*{message}"):
        row_with(**changes)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[str, SpecRow]:
    """The table, as it was again afterwards."""
    for name in list(SPEC_TABLE):
        monkeypatch.setitem(SPEC_TABLE, name, SPEC_TABLE[name])
    before = dict(SPEC_TABLE)
    monkeypatch.setattr("ucmcache.coordinator.spec.SPEC_TABLE", before)
    monkeypatch.setattr("ucmcache.coordinator.spec._loaded", set())
    return before


def test_a_registered_row_covers_its_class(table: dict[str, SpecRow]) -> None:
    row = row_with()
    register(row)
    register(row_with())  # the same again: a module may be imported twice
    assert table["NewSpec"] == row
    assert bind([facts(0, "NewSpec")], table)[0].spec == row


def test_what_is_not_registered(table: dict[str, SpecRow]) -> None:
    register(row_with())
    with pytest.raises(ConfigError, match="there is a row for NewSpec already"):
        register(row_with(why="another"))
    with pytest.raises(ConfigError, match="there is a row for MambaSpec already"):
        register(row_with(spec_class="MambaSpec"))
    with pytest.raises(ConfigError, match="a row for RSWASpec is not accepted: what a token attends to"):
        register(row_with(spec_class="RSWASpec"))
    follower = {"kind": Kind.NONE, "reach": None, "access_unit": AccessUnit.FOLLOWER}
    with pytest.raises(ConfigError, match="follows NowhereSpec, of which there is no row"):
        register(row_with(spec_class="SharingSpec", source="NowhereSpec", **follower))
    register(row_with(spec_class="SharingSpec", source="NewSpec", **follower))
    assert [row.spec.votes for row in bind([facts(0, "NewSpec"), facts(1, "SharingSpec")], table)] == [True, False]
    with pytest.raises(ConfigError, match="follows SharingSpec, which keeps nothing; accepted are FullAttentionSpec"):
        register(row_with(spec_class="OtherSpec", source="SharingSpec", **follower))
    with pytest.raises(UnsupportedModelError, match="follows NewSpec, of which this model has no group"):
        bind([facts(0, "FullAttentionSpec"), facts(1, "SharingSpec")], table)


@pytest.mark.parametrize(
    ("reach", "message"),
    [
        (lambda p, figures: p + 1, r"gives \[1, 9\] for positions \[0, 8\]"),  # behind the position
        (lambda p, figures: p - 9, r"gives \[-9, -1\] for positions \[0, 8\]"),  # before the first token
        (lambda p, figures: np.where(p > 64, 0, p), r"gives \[64, 0\] for positions \[64, 72\]"),  # back again
        (lambda p, figures: np.maximum(0, (p > 1 << 20) * (p + 1)), "for positions"),  # only far away
        (lambda p, figures: np.zeros(1, np.int64), r"gives a ndarray\(1,\) for positions"),  # one for all
        (lambda p, figures: p / 2, r"gives a ndarray\(\d+,\) .* accepted is an integer array"),
        (lambda p, figures: 0, "gives a int for positions"),
        (lambda p, figures: p - figures["span"], r"reach fails \(KeyError: 'span'\); correct reach, or the figures"),
    ],
)
def test_a_reach_that_cannot_be_is_refused_when_bound(reach: Any, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=r"group 0 \(NewSpec\): its row's reach .*correct reach") as error:
        bind([facts(0, "NewSpec")], {"NewSpec": row_with(reach=reach)})
    assert re.search(message, str(error.value))


@pytest.mark.parametrize(
    ("figure", "said"), [("span", "nothing of that name"), ("sliding_window", "a lot"), ("sliding_window", 1.5)]
)
def test_a_figure_that_the_spec_lacks_is_refused_when_bound(figure: str, said: object) -> None:
    spec = SimpleNamespace(sliding_window=said)
    with pytest.raises(UnsupportedModelError, match=rf"its row reads {figure} \(the spec has {said!r}\); accepted are"):
        bind([replace(facts(0, "NewSpec"), spec=spec)], {"NewSpec": row_with(figures=(figure,))})


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("RSWASpec", r"FullAttentionSpec, with layers of RSWASpec\): what a token attends to"),
        ("NewSpec", r"FullAttentionSpec, with layers of NewSpec\): a group is kept as one, and no row keeps these as"),
        ("SlidingWindowSpec", r"with layers of SlidingWindowSpec\): a group is kept as one"),
        ("MambaSpec", r"with layers of MambaSpec\): a group is kept as one"),
    ],
)
def test_a_group_whose_layers_need_different_things_is_refused(other: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        bind([facts(0, "FullAttentionSpec", others=frozenset({other, "MLAAttentionSpec"}))])
    bind([facts(0, "FullAttentionSpec", others=frozenset({"MLAAttentionSpec"}))])


def test_layers_of_one_group_that_differ_in_a_figure_are_refused() -> None:
    from tests.connector.test_layout import attention, group_of, text_of

    windows = [attention("SlidingWindowSpec", sliding_window=20, extra_retained_tokens=extra) for extra in (0, 3)]
    assert text_of(group_of(windows[0], windows[0]))
    with pytest.raises(UnsupportedModelError, match=r"differ in extra_retained_tokens \({'layer0': 0, 'layer1': 3}\)"):
        text_of(group_of(*windows))


@pytest.mark.parametrize("tokens", [1, 4, 8, Fraction(1, 4)])
def test_a_block_of_a_compressed_cache_holds_whole_groups(tokens: int | Fraction) -> None:
    from tests.connector.test_layout import attention, group_of, text_of

    full = attention("FullAttentionSpec")
    assert text_of(group_of(full, attention("MLAAttentionSpec", tokens_per_state=tokens)))
    for tokens_cut in (3, Fraction(3, 2)):
        cut = attention("MLAAttentionSpec", tokens_per_state=tokens_cut)
        message = rf"layer1 ends within a group .*block_size 8, tokens_per_state {tokens_cut}\)"
        with pytest.raises(UnsupportedModelError, match=message):
            text_of(group_of(full, cut))


def test_layers_that_share_anothers_blocks_change_nothing() -> None:
    """vLLM adds kv-sharing layers to the tensors that a worker registers, and to no group that it tells us of."""
    import torch

    from ucmcache.connector.layout import Storages, unit_map

    own = torch.zeros(4, 2, 8, 16)
    alone = unit_map({"a": own}, ["a"], 4, Storages())
    assert unit_map({"a": own, "b": own}, ["a"], 4, Storages()) == alone


# -- what ranks hold --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "alike"),
    [
        ("FullAttentionSpec", {}, 1),
        ("FullAttentionSpec", {"tp_shards": 2}, 2),  # two KV heads over four ranks
        ("FullAttentionSpec", {"tp_shards": 3}, 1),  # does not divide
        ("FullAttentionSpec", {"tp_shards": 8}, 1),
        ("MLAAttentionSpec", {}, 4),
        ("MLAAttentionSpec", {"tp_shards": 1}, 4),
        ("MLAAttentionSpec", {"tp_shards": 4}, 1),  # the engine knows better
        ("MLAAttentionSpec", {"others": frozenset({"FullAttentionSpec"})}, 1),
        ("MambaSpec", {}, 1),
        ("MambaSpec", {"tp_shards": 1}, 4),
    ],
)
def test_how_many_ranks_hold_the_same(name: str, options: dict[str, Any], alike: int) -> None:
    [row] = bind([facts(0, name, **options)])
    assert row.ranks_alike(4) == alike
    assert row.ranks_alike(1) == 1


def test_a_group_of_two_classes_that_all_ranks_hold_is_alike() -> None:
    latent = SPEC_TABLE["MLAAttentionSpec"]
    table = {**SPEC_TABLE, "NewSpec": replace(latent, spec_class="NewSpec")}
    [row] = bind([facts(0, "MLAAttentionSpec", others=frozenset({"NewSpec"}))], table)
    assert row.ranks_alike(4) == 4


def test_what_a_real_group_says_of_its_ranks() -> None:
    from tests.connector.test_layout import attention, group_of
    from ucmcache.connector.layout import group_facts

    shards = [attention("FullAttentionSpec", max_tp_shards=n) for n in (1, 2)]
    assert group_facts(0, group_of(shards[0])).tp_shards == 1
    assert group_facts(0, group_of(*shards)).tp_shards == 2
    assert group_facts(0, group_of(shards[0], attention("FullAttentionSpec"))).tp_shards is None
    mixed = group_facts(0, group_of(attention("MLAAttentionSpec"), attention("FullAttentionSpec")))
    assert mixed.others == {"FullAttentionSpec"}


def test_the_table_is_shown_at_start() -> None:
    rows = bind([facts(0, "FullAttentionSpec", 16), facts(1, "MLAAttentionSpec"), facts(2, "MambaSpec", 16)])
    rows += bind([facts(3, "CircularBufferSpec", 5)])
    seeds = {row.group: row.seed for row in rows}
    blocks = BlockStore([ArenaPlan(1000, 60, (0,)), ArenaPlan(300, 90, (1,))], seeds, b"n" * 16)
    states = SnapshotStore([ArenaPlan(70_000, 12, (2,))], seeds, b"n" * 16)
    shown = Coordinator(rows, blocks, states, None).describe().splitlines()
    assert [line.split()[:4] for line in shown[1:5]] == [
        ["0", "FullAttentionSpec", "chain", "yes"],
        ["1", "MLAAttentionSpec", "chain", "yes"],
        ["2", "MambaSpec", "snapshot", "yes"],
        ["3", "CircularBufferSpec", "none", "no"],
    ]
    assert [line.split()[-1] for line in shown[1:4]] == ["intersection", "union", "intersection"]
    assert shown[1].split()[4:8] == ["16", "1,000", "layer", "every"]
    assert shown[5].endswith(
        "token takes 100 bytes of each rank's host memory over all groups; 720 tokens fit"
    )  # 90 * 8
    assert shown[6] == "a state takes 70,000 bytes of each rank's host memory over all groups; 12 states fit"
    assert shown[7] == "resume positions are multiples of 16 tokens"


def test_what_ranks_keep_once_is_shown_as_such() -> None:
    rows = bind([facts(0, "FullAttentionSpec", 16), facts(1, "MLAAttentionSpec", 16)])
    seeds = {row.group: row.seed for row in rows}
    blocks = BlockStore([ArenaPlan(1600, 60, (0,)), ArenaPlan(1600, 80, (1,), 4)], seeds, b"n" * 16)
    shown = Coordinator(rows, blocks, SnapshotStore([], seeds, b"n" * 16), None).describe().splitlines()
    assert [line.endswith("union, once for 4 ranks") for line in shown[1:3]] == [False, True]
    assert shown[3] == "a token takes 125 bytes of each rank's host memory over all groups; 960 tokens fit"
    assert len(shown) == 5  # no recurrent groups: nothing is said of states


def test_a_subclass_is_not_taken_for_its_parent() -> None:
    """By exact name: a subclass may free its blocks by other rules, or lay them out otherwise."""
    classes = spec_classes()
    subclasses = [
        name for name, class_ in classes.items() if any(base.__name__ in SPEC_TABLE for base in class_.__mro__[1:])
    ]
    assert {"RSWASpec", "SlidingWindowMLASpec", "MLAAttentionSpec"} <= set(subclasses)
    for name in subclasses:
        if name in SPEC_TABLE:
            [bound] = bind([facts(0, name)])
            assert bound.spec.spec_class == name
        else:
            with pytest.raises(UnsupportedModelError, match=name):
                bind([facts(0, name)])


def test_the_class_of_a_real_group_is_its_layers_own() -> None:
    """Through the connector's reading of vLLM's groups, wrapped in a uniform group or not."""
    from tests.connector.test_layout import attention, group_of
    from ucmcache.connector.layout import group_facts

    class Derived(type(attention("FullAttentionSpec"))):  # type: ignore[misc]
        """As a plugin may register one."""

    derived = Derived(
        **{name: getattr(attention("FullAttentionSpec"), name) for name in ("num_kv_heads", "head_size")},
        block_size=8,
        dtype=attention("FullAttentionSpec").dtype,
    )
    for group in (group_of(derived), group_of(derived, derived)):
        found = group_facts(3, group)
        assert (found.spec_class, found.block_tokens, found.group) == ("Derived", 8, 3)
        with pytest.raises(UnsupportedModelError, match=r"group 3 \(Derived, 8 tokens a block\)"):
            bind([found])
    assert group_facts(0, group_of(attention("MLAAttentionSpec"), attention("MLAAttentionSpec"))).spec_class == (
        "MLAAttentionSpec"
    )


# -- groups that the engine itself does not keep ----------------------------------------------------------------------


@dataclass
class Held:
    """A store that holds every unit of the given groups, and no other."""

    groups: frozenset[int]

    def presences(self, groups: Sequence[int], prefixes: Sequence[bytes]) -> NDArray[np.uint8]:
        codes = [Presence.READY if group in self.groups else Presence.ABSENT for group in groups]
        return np.repeat(np.array(codes, dtype=np.uint8)[:, None], len(prefixes), axis=1)

    def fate(self, group: int, prefix: bytes) -> str | None:
        return None


def resume_tokens(rows: Sequence[BoundRow], held: set[int], num_tokens: int = 101) -> int:
    unit = 8
    prompt = Prompt(num_tokens, [b"%d" % i for i in range(num_tokens // unit)], unit)
    store = Held(frozenset(held))
    return resolve_hit(prompt, rows, store, store).resume_tokens


@pytest.mark.parametrize(
    "silent",
    [facts(1, "CircularBufferSpec", 5), facts(1, "NewSpec", 2304, cacheable=False)],
    ids=["a row of kind NONE", "not cacheable, whatever its class"],
)
def test_what_is_not_kept_has_no_vote(silent: GroupFacts) -> None:
    """Field case B12: an odd block size of such a group neither stops the start nor makes resumes coarse."""
    rows = bind([facts(0, "FullAttentionSpec"), silent, facts(2, "MambaSpec")])
    assert [row.kind for row in rows] == [Kind.CHAIN, Kind.NONE, Kind.SNAPSHOT]
    assert grid_tokens(rows) == 8
    assert resume_tokens(rows, {0, 2}) == 96
    assert resume_tokens(rows, {0, 1}) == 0  # the states do vote
    assert resume_tokens(rows, {1, 2}) == 0  # and so do the blocks


def test_a_covered_class_that_is_not_cacheable_is_left_alone() -> None:
    rows = bind([facts(0, "FullAttentionSpec"), facts(1, "SlidingWindowSpec", 3, cacheable=False, draft=True)])
    assert (rows[1].kind, rows[1].lookahead_blocks) == (Kind.NONE, 0)
    assert resume_tokens(rows, {0}) == 96


def test_a_pool_without_a_vote_is_never_resumed() -> None:
    assert resume_tokens(bind([facts(0, "CircularBufferSpec")]), {0}) == 0


@pytest.mark.parametrize(
    ("options", "spec_values", "kind"),
    [
        ({}, {}, Kind.CHAIN),
        ({"enable_kv_transfer": False}, {}, Kind.NONE),
        ({}, {"bounded_replay": False}, Kind.CHAIN),
        ({}, {"bounded_replay": True}, Kind.NONE),
    ],
)
def test_what_a_real_group_says_of_itself(options: dict[str, Any], spec_values: dict[str, Any], kind: Kind) -> None:
    from tests.connector.test_layout import attention, group_of
    from ucmcache.connector.layout import group_facts

    name = "SlidingWindowMLASpec" if spec_values else "FullAttentionSpec"
    spec = attention(name, **({"sliding_window": 16, **spec_values} if spec_values else {}))
    row = SpecRow(name, Kind.CHAIN, "a test", reach=SPEC_TABLE["FullAttentionSpec"].reach)
    [bound] = bind([group_facts(0, group_of(spec, **options))], {name: row})
    assert bound.kind is kind


@pytest.mark.parametrize("follows", [False, True])
def test_a_row_that_keeps_nothing_of_what_the_engine_caches_is_refused(
    table: dict[str, SpecRow], monkeypatch: pytest.MonkeyPatch, follows: bool
) -> None:
    """Else the engine would take the blocks that a load left empty for the prefix's own."""
    from tests.connector.test_layout import attention, group_of
    from ucmcache.connector.layout import group_facts

    class ScratchSpec(type(attention("FullAttentionSpec"))):  # type: ignore[misc]
        """As a plugin may define one."""

        cached = True

        @property
        def prefix_cacheable(self) -> bool:
            return self.cached

    monkeypatch.setattr("ucmcache.connector.layout.SPEC_TABLE", table)
    source = {"access_unit": AccessUnit.FOLLOWER, "source": "FullAttentionSpec"} if follows else {}
    register(row_with(spec_class="ScratchSpec", kind=Kind.NONE, reach=None, **source))
    full = attention("FullAttentionSpec")
    scratch = ScratchSpec(block_size=8, num_kv_heads=full.num_kv_heads, head_size=full.head_size, dtype=full.dtype)
    for group in (group_of(scratch), group_of(scratch, scratch)):
        monkeypatch.setattr(ScratchSpec, "cached", True)
        with pytest.raises(
            UnsupportedModelError, match=r"group 1 \(ScratchSpec\): .* let the spec's prefix_cacheable be"
        ):
            bind([group_facts(0, group_of(full)), group_facts(1, group)], table)
        monkeypatch.setattr(ScratchSpec, "cached", False)
        rows = bind([group_facts(0, group_of(full)), group_facts(1, group)], table)
        assert [row.kind for row in rows] == [Kind.CHAIN, Kind.NONE]


# -- how far back a resume reaches ------------------------------------------------------------------------------------

POSITIONS = st.lists(st.integers(0, 1 << 20), min_size=1, max_size=20)


def manager(class_name: str, **figures: int) -> Any:
    """One of vLLM's block managers, with only what its rule reads."""
    managers = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
    made = object.__new__(getattr(managers, class_name))
    vars(made).update(figures)
    return made


def assert_reach(row: BoundRow, engine: Any, positions: Sequence[int]) -> None:
    found = row.first_needed(np.array(positions, dtype=np.int64)).tolist()
    assert found == [engine.get_num_skipped_tokens(p) for p in positions]


@settings(deadline=None)
@given(st.integers(1, 1 << 16), st.integers(0, 64), POSITIONS)
def test_a_window_reaches_as_far_as_the_engine_keeps_it(window: int, extra: int, positions: list[int]) -> None:
    spec = SimpleNamespace(sliding_window=window, extra_retained_tokens=extra)
    [row] = bind([replace(facts(0, "SlidingWindowSpec"), spec=spec)])
    engine = manager("SlidingWindowManager", sliding_window=window, extra_retained_tokens=extra)
    assert_reach(row, engine, [*positions, window - 1, window, window + 1])


@settings(deadline=None)
@given(st.integers(1, 1 << 16), POSITIONS)
def test_a_chunk_reaches_as_far_as_the_engine_keeps_it(chunk: int, positions: list[int]) -> None:
    [row] = bind([replace(facts(0, "ChunkedLocalAttentionSpec"), spec=SimpleNamespace(attention_chunk_size=chunk))])
    engine = manager("ChunkedLocalAttentionManager", attention_chunk_size=chunk)
    assert_reach(row, engine, [*positions, chunk - 1, chunk, chunk + 1])


@given(POSITIONS)
def test_full_attention_reaches_to_the_start(positions: list[int]) -> None:
    for name in ("FullAttentionSpec", "MLAAttentionSpec"):
        [row] = bind([facts(0, name)])
        assert_reach(row, manager("FullAttentionManager"), positions)


def test_figures_are_read_from_the_engines_own_spec() -> None:
    """A figure that a row names and the class lacks would be read as 0: too little would be asked for."""
    from dataclasses import fields

    classes = spec_classes()
    for name, row in SPEC_TABLE.items():
        assert set(row.figures) <= {field.name for field in fields(classes[name])}, name
        assert (row.reach is not None) == (row.kind is Kind.CHAIN), name


# -- drafters, seeds --------------------------------------------------------------------------------------------------


def test_a_drafters_group_needs_the_block_after() -> None:
    """Its KV of a token also depends on the next token, so a block ends one token before it is certain."""
    rows = bind([facts(0, "FullAttentionSpec"), facts(1, "FullAttentionSpec", draft=True)])
    assert [row.lookahead_blocks for row in rows] == [0, 1]
    assert resume_tokens(rows, {0, 1}) == 88
    assert resume_tokens(rows[:1], {0, 1}) == 96
    assert bind([facts(0, "MambaSpec", draft=True)])[0].lookahead_blocks == 0


def test_a_real_drafters_group_is_known_as_one() -> None:
    from tests.connector.test_layout import attention, group_of
    from ucmcache.connector.layout import group_facts

    spec = attention("FullAttentionSpec")
    assert [group_facts(0, group_of(spec, is_eagle_group=draft)).draft for draft in (False, True)] == [False, True]


def test_a_seed_names_the_content_and_not_the_index() -> None:
    base = facts(0, "FullAttentionSpec", 8, content="a")
    [seed] = (row.seed for row in bind([base]))
    others = [
        facts(0, "FullAttentionSpec", 8, content="b"),
        facts(0, "FullAttentionSpec", 16, content="a"),
        facts(0, "MambaSpec", 8, content="a"),
    ]
    seeds = [row.seed for other in others for row in bind([other])]
    assert len({seed, *seeds}) == 4
    assert [row.seed for row in bind([replace(base, group=5)])] == [seed]
