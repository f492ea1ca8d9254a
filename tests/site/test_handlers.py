"""The ClientApp: bad requests come back as refusals, and nothing heavy is imported for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from flower_geo.messages import Reply
from flower_geo.site import client_app
from tests.federation import copied
from tests.site.requests import Desk

KINDS = ("query", "train", "evaluate")


def served(records: RecordDict, kind: str, node: dict[str, Any]) -> Reply:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(records, 7, kind)
    message.metadata.__dict__["_message_id"] = "m1"
    context = Context(1, 7, dict(node), RecordDict(), {})
    reply = copied(client_app()(copied(message), context))
    assert reply.metadata.reply_to_message_id == "m1"
    return Reply.from_records(reply.content)


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_request_is_served(desk: Desk, north: dict[str, Any], kind: str) -> None:
    reply = served(desk.request(1).to_records(), kind, north)
    assert (reply.status, reply.site, reply.error) == ("done", "north", "")
    assert (reply.arrays is not None) == (kind == "train")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "records",
    [RecordDict(), RecordDict({"geo": ConfigRecord()}), RecordDict({"geo": ArrayRecord()}),
     RecordDict({"geo": MetricRecord({"round": 1})}),
     RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord({"lr": 0.1})})],
)  # fmt: skip
def test_what_is_no_request_is_refused(north: dict[str, Any], records: Any, kind: str) -> None:
    reply = served(records, kind, north)
    assert (reply.status, reply.site, reply.error) == ("refused", "north", "ConfigError")
    assert "a request cannot be read" in reply.detail and "\n" not in reply.detail


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "value"),
    [("run_name", "../../etc"), ("round", -1), ("version", -5), ("payload", "pickle"),
     ("protocol", 99), ("consumed", 2**62), ("position", float("nan"))],
)  # fmt: skip
def test_a_spoilt_request_is_refused(
    desk: Desk, north: dict[str, Any], kind: str, field: str, value: Any
) -> None:
    records = desk.request(1).to_records()
    records.config_records["geo"][field] = value
    reply = served(records, kind, north)
    assert (reply.status, reply.error) == ("refused", "ConfigError")
    assert not Path(north["state-dir"]).exists()


@pytest.mark.parametrize(
    ("own", "error", "site"),
    [({"site": "../x"}, "ConfigError", "unnamed"), ({"data": "/not/here"}, "DataError", "north"),
     ({"device": "toaster"}, "ConfigError", "north"),
     ({"state-dir": "/dev/null/x"}, "StateError", "north")],
)  # fmt: skip
def test_what_is_wrong_at_the_site_is_said(
    desk: Desk, north: dict[str, Any], own: dict[str, Any], error: str, site: str
) -> None:
    for kind in KINDS:
        reply = served(desk.request(1).to_records(), kind, {**north, **own})
        assert (reply.status, reply.site, reply.error) == ("refused", site, error)
        assert 10 < len(reply.detail) <= 500


def test_a_site_without_a_name_is_refused(desk: Desk, north: dict[str, Any]) -> None:
    del north["site"]
    reply = served(desk.request(1).to_records(), "train", north)
    assert reply.status == "refused" and "this site has no name" in reply.detail
    reply = served(desk.request(1).to_records(), "train", {**north, "partition-id": "x"})
    assert reply.status == "refused" and "partition-id='x'" in reply.detail


IMPORTS = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path("apps/diloco").resolve()))
import client_app
heavy = {"torch", "transformers", "datasets", "safetensors", "numpy.random.mtrand"}
print(sorted(heavy & sys.modules.keys()))
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
message = Message(RecordDict(), 7, "train")
message.metadata.__dict__["_message_id"] = "m1"
reply = client_app.app(message, Context(1, 7, {"site": "a"}, RecordDict(), {}))
print(reply.content.config_records["geo"]["status"], "torch" in sys.modules)
"""


def test_the_client_app_imports_no_torch_before_a_request_needs_it() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=root, capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()[-2:]
    assert first in ("[]", "['numpy.random.mtrand']")
    assert second == "refused False"
