"""Sum decoded + residual = sum given, over everything a run has to live through.

Lost, duplicated, late, spoilt and refused replies, two restarts of the coordinator
and of a site (one in the middle of writing its state), through the real strategy and
the real site code.  What counts is read from the journal: each committed reply is
known there by the hash of its payload.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, Error, Message
from torch import Tensor

from flower_geo.compression import Codec, record_blobs
from flower_geo.compression.adaptive import AdaptiveChoice
from flower_geo.config import DiLoCoConfig
from flower_geo.resilience import Journal
from flower_geo.resilience.replies import payload_hash
from flower_geo.site import work
from flower_geo.site.state import SiteState
from flower_geo.site.tasks import pretrain
from tests.federation import Node
from tests.resilience.scripted import Clock
from tests.strategies.lines import SlowGrid, on_clock, slow_federation
from tests.strategies.runs import Killed, configured, equal, events, federation, run

ROUNDS, SITES, DEADLINE = 16, 3, 100.0
FAST = 1e9
State = dict[str, Tensor]


class Ledger:
    """Every update a site was given to send, and the bytes it became."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: dict[str, State] = {}
        self.sent: dict[str, dict[str, bytes]] = {}
        encoded = work._encoded

        def noted(session: Any, base: State, residual: Mapping[str, Tensor]) -> Any:
            made, local = encoded(session, base, residual), session.task.local()
            assert made[1] == "delta"
            blobs = record_blobs(made[0])
            key = payload_hash(blobs)
            self.sent[key] = blobs
            self.given[key] = {name: base[name] - local[name] for name in base}
            return made

        monkeypatch.setattr(work, "_encoded", noted)


#: What may happen to a reply; drawn without putting back until the deck is through.
DECK = ("good", "twice", "late", "lost", "error", "spoilt", "restart")


class Chaos:
    """Decides the fate of every train message; the same ones for the same deck.

    ``site-0`` always answers, so that every round can commit.
    """

    def __init__(self, grid: SlowGrid, deck: list[str], kill_at: int | None) -> None:
        self.grid, self.deck, self.kill_at = grid, deck, kill_at
        self.fates: Counter[str] = Counter()
        self.replies = 0

    def __call__(self, site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type != "train" or not reply.has_content():
            return [reply]
        self.replies += 1
        if self.replies == self.kill_at:
            raise Killed
        if site == "site-0":
            return [reply] * (1 + self.replies % 2)
        fate = self.deck.pop()
        self.fates[fate] += 1
        node = message.metadata.dst_node_id
        if fate == "twice":
            return [reply, reply]
        if fate == "late":
            round = int(message.metadata.group_id)
            self.grid.extra[site, round] = DEADLINE - 25  # within the next round
        elif fate == "error":
            return [Message(Error(8, "the ClientApp died"), reply_to=message)]
        elif fate == "spoilt":
            arrays = reply.content.array_records["arrays"]
            name = next(iter(arrays))
            data = bytearray(arrays[name].data)
            data[len(data) // 2] ^= 4
            arrays[name] = Array(
                arrays[name].dtype, tuple(arrays[name].shape), arrays[name].stype, bytes(data)
            )
        elif fate in ("lost", "restart"):
            # A SuperNode that comes back has another node id and an empty memory.
            if fate == "restart":
                pretrain.workbench.cache_clear()
            old = self.grid.nodes.pop(node)
            self.grid.nodes[node + 1000] = Node(node + 1000, old.config)
            return [] if fate == "lost" else [reply]
        return [reply]


def dying_sites(monkeypatch: pytest.MonkeyPatch, calls: dict[int, str]) -> list[int]:
    """A site's process dies at its n-th save of a generation, before or after the rename."""
    count, died = [0], []
    save = SiteState.save

    def killed(self: SiteState, generation: Any) -> None:
        count[0] += 1
        when = calls.get(count[0])
        if when is not None:
            died.append(count[0])
        if when == "before":
            (self.folder / f".gen-{generation.round:06d}.abcdefgh").mkdir()
            raise RuntimeError("killed before the state was written")
        save(self, generation)
        if when == "after":
            raise RuntimeError("killed before the reply was sent")

    monkeypatch.setattr(SiteState, "save", killed)
    return died


def accepted_rounds(config: DiLoCoConfig) -> dict[str, int]:
    folder = Path(config.run_dir) / config.run_name / "checkpoints"
    newest = json.loads(max(folder.glob("round-*/state.json")).read_text())
    return {site["name"]: site["accepted"] for site in newest["state"]["sites"]}


def commits(config: DiLoCoConfig) -> dict[str, list[str]]:
    """Payload hashes that counted, by site, in order."""
    journal = Journal(Path(config.run_dir) / config.run_name / "journal.jsonl")
    found: dict[str, list[str]] = defaultdict(list)
    for entry in journal.entries():
        for reply in entry.get("replies", []):
            found[reply["site"]].append(reply["payload"])
    return found


def residual_of(tmp_path: Path, site: str, round: int) -> State:
    folder = next((tmp_path / "state").glob(f"diloco-*/{site}"))
    name, uid = folder.parent.name.rsplit("-", 1)
    found = SiteState(tmp_path / "state", name, uid, site).load(round)
    assert found is not None
    return found.residual


def cycling(self: AdaptiveChoice, sites: Any = ()) -> None:
    """Another codec every round for everyone: the hardest a choice can be on a residual."""
    for name in (*self._sites, *sites):
        place = self._at(name)
        place.rung = self.rungs[(self.rungs.index(place.rung) + 1) % len(self.rungs)]


SPARSE = "topk(density=0.05,chunk=4096)|int4(block=64)"


@pytest.mark.parametrize(
    ("codec_up", "dtype", "staleness"),
    [("int4(block=64)", "fp32", 2), (SPARSE, "fp32", 1), ("adaptive", "fp32", 2),
     (SPARSE, "bf16", 1)],
)  # fmt: skip
def test_nothing_given_is_lost_over_a_run_of_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec_up: str, dtype: str, staleness: int
) -> None:
    clock = Clock()
    on_clock(monkeypatch, clock)
    ledger = Ledger(monkeypatch)
    monkeypatch.setattr(AdaptiveChoice, "settle", cycling)
    died = dying_sites(monkeypatch, {8: "before", 17: "after"})
    config = configured(
        tmp_path, **{
            "codec-up": codec_up, "feedback-dtype": dtype, "rounds": ROUNDS, "deadline": DEADLINE,
            "max-staleness": staleness, "codec-down": "int8(block=256)", "max-norm-factor": 0.0,
            "codec-ladder": f"bf16 > int8(block=256) > {SPARSE}", "feedback-decay": 1.0,
            # Sites rest after failures, so a round may have one site, and that one may die.
            "strict-start": False, "max-retries": 2,
        },
    )  # fmt: skip
    fates: Counter[str] = Counter()
    decks = [random.Random(seed).sample(DECK, len(DECK)) for seed in range(20)]
    deck = [fate for each in decks for fate in each]
    for kill_at in (8, 11, None):
        grid = slow_federation(tmp_path, SITES, clock, lambda *_: (FAST, FAST))
        chaos = Chaos(grid, deck, kill_at)
        grid.tamper = chaos
        if kill_at is None:
            run(config, grid)
        else:
            with pytest.raises(Killed):
                run(config, grid)
        fates += chaos.fates

    # It was a run of faults.
    assert min(fates[fate] for fate in DECK) > 0, fates
    assert len(died) == 2 and len(events(config, "start")) == 3
    statuses = Counter(e["status"] for e in events(config, "site"))
    assert min(statuses[s] for s in ("accepted", "missing", "failed", "refused")) > 0, statuses
    assert any(e.get("staleness") for e in events(config, "site") if e["status"] == "accepted")
    assert [e["round"] for e in events(config, "round")] == list(range(1, ROUNDS + 1))

    counted, newest = commits(config), accepted_rounds(config)
    assert sum(len(payloads) for payloads in counted.values()) < len(ledger.given)  # some was lost
    for site, payloads in counted.items():
        assert len(set(payloads)) == len(payloads) >= 2
        residual = residual_of(tmp_path, site, newest[site])
        for name, held in residual.items():
            assert held.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
            given = sum(ledger.given[key][name].double() for key in payloads)
            decoded = sum(Codec.decode(ledger.sent[key][name]).double() for key in payloads)
            assert isinstance(given, Tensor) and isinstance(decoded, Tensor)
            largest = max(float(ledger.given[key][name].abs().max()) for key in payloads)
            rounding = 2.0**-24 if dtype == "fp32" else 2.0**-8
            error = float((decoded + held.double() - given).abs().max())
            allowed = 4 * len(payloads) * rounding * largest
            assert error <= allowed, (site, name, error)
            # And there was something to lose: without the residual the sums differ by far more.
            if name.endswith("wte.weight") and dtype == "fp32":
                assert float(held.abs().max()) > 20 * allowed


def test_the_chain_breaks_when_a_residual_is_not_rolled_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The identity above can fail: here each update goes on from the newest residual."""
    clock = Clock()
    on_clock(monkeypatch, clock)
    ledger = Ledger(monkeypatch)
    newest: dict[str, State] = {}
    noted = work._encoded

    def newest_residual(session: Any, base: State, residual: State) -> Any:
        made = noted(session, base, newest.get(session.site, residual))
        newest[session.site] = made[2]
        return made

    monkeypatch.setattr(work, "_encoded", newest_residual)

    def lose(site: str, message: Message, reply: Message) -> list[Message]:
        train = message.metadata.message_type == "train"
        return [] if train and site == "site-1" and message.metadata.group_id == "2" else [reply]

    config = configured(
        tmp_path, **{"codec-up": SPARSE, "rounds": 4, "deadline": DEADLINE}
    )  # fmt: skip
    run(config, slow_federation(tmp_path, 2, clock, lambda *_: (FAST, FAST), lose))
    payloads = commits(config)["site-1"]
    assert len(payloads) == 3
    worst = 0.0
    for name, held in newest["site-1"].items():
        given = sum(ledger.given[key][name] for key in payloads)
        decoded = sum(Codec.decode(ledger.sent[key][name]) for key in payloads)
        assert isinstance(given, Tensor) and isinstance(decoded, Tensor)
        worst = max(worst, float((decoded + held - given).abs().max()))
    assert worst > 1e-4


# -- versions: a site whose copy of the model went bad ----------------------------


BASES: dict[str, Any] = {"rounds": 4, "deadline": DEADLINE, "codec-up": "int4(block=64)"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> State:
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(configured(folder, **BASES), federation(folder, 2))


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "other weights", "meta"])
def test_a_damaged_base_heals_by_a_snapshot_within_the_round(
    tmp_path: Path, undisturbed: State, damage: str
) -> None:
    def spoil(site: str, message: Message, reply: Message) -> list[Message]:
        if (site, message.metadata.message_type, message.metadata.group_id) == (
            "site-1", "train", "2",
        ):  # fmt: skip
            folder = next((tmp_path / "state").glob("diloco-*/site-1"))
            file = folder / "base" / "weights.safetensors"
            data = bytearray(file.read_bytes())
            if damage == "flipped":
                data[len(data) // 2] ^= 1
                file.write_bytes(bytes(data))
            elif damage == "cut":
                file.write_bytes(bytes(data[:-7]))
            elif damage == "gone":
                file.unlink()
            elif damage == "meta":
                (folder / "base" / "base.json").write_text("{}")
            else:  # whole files of weights that are not the version they say
                name, uid = folder.parent.name.rsplit("-", 1)
                state = SiteState(tmp_path / "state", name, uid, "site-1")
                version, held = state.base()
                weights = state.load_base()
                assert weights is not None
                state.save_base(version, held, {n: t + 0.5 for n, t in weights.items()})
        return [reply]

    config = configured(tmp_path, **BASES)
    healed = run(config, federation(tmp_path, 2, spoil))
    assert equal(healed, undisturbed)
    assert [e["accepted"] for e in events(config, "round")] == [2] * 4
    down = {e["round"]: e["bytes_down"] for e in events(config, "site") if e["site"] == "site-1"}
    assert down[3] > 3 * down[4]  # a snapshot came on top


@pytest.mark.parametrize(
    ("missed", "codec_down", "kind"),
    [(3, SPARSE, "deltas"), (9, SPARSE, "snapshot"), (2, "bf16", "snapshot")],
)
def test_a_site_that_was_away_catches_up_by_what_is_smaller(
    tmp_path: Path, missed: int, codec_down: str, kind: str
) -> None:
    """Deltas within the window of eight versions, unless the model itself is less."""
    back = 3 + missed

    def leave(site: str, message: Message, reply: Message) -> list[Message]:
        if (site, message.metadata.message_type) == ("site-0", "train"):
            following = int(message.metadata.group_id) + 1
            # Greeted in one round, it is asked in the next.
            grid.nodes[101].online = not 3 <= following < back - 1
        return [reply]

    grid = federation(tmp_path, 2, leave)
    config = configured(
        tmp_path, **{"rounds": back + 1, "codec-down": codec_down, "deadline": DEADLINE}
    )
    run(config, grid)
    offers = {
        int(message.metadata.group_id): message.content.config_records["geo"]
        for message in grid.pushed
        if message.metadata.dst_node_id == 101 and message.metadata.message_type == "train"
    }
    assert sorted(offers) == [1, 2, back, back + 1]
    offer = offers[back]
    # It trained round 2 from version 1; round r is trained from version r - 1.
    wanted = ("deltas", 2, back - 1) if kind == "deltas" else ("snapshot", back - 1, back - 1)
    assert (offer["payload"], offer["first"], offer["last"]) == wanted
    assert offers[back + 1]["payload"] == "deltas"
    lines = [e for e in events(config, "site") if e["site"] == "site-1"]
    assert {e["status"] for e in lines} == {"accepted"} and len(lines) == 4
