"""Goal: the documented error reasons are the ones that exist.

Method: compare docs/errors.md, the Python enum, the proto enum and the mapping to gRPC codes, name by name.
"""

import re
from pathlib import Path

from kvtierd.core import saves
from kvtierd.errors import Reason
from kvtierd.service.status import CODES
from kvtierd.v1 import kvtier_pb2 as pb

DOC = Path(__file__).parents[2] / "docs" / "errors.md"


def test_table_equals_the_code() -> None:
    rows = dict(re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \|", DOC.read_text(), re.M))
    assert rows == {reason.name: CODES[reason].name for reason in Reason if reason}


def test_python_and_proto_reasons_are_equal() -> None:
    wire = {name.removeprefix("ERROR_REASON_"): number for name, number in pb.ErrorReason.items()}
    assert wire == {reason.name: reason.value for reason in Reason}


def test_save_outcomes_are_equal() -> None:
    wire = {number: name.removeprefix("SAVE_OUTCOME_").lower() for name, number in pb.SaveOutcome.items() if number}
    assert [wire[n] for n in range(1, len(wire) + 1)] == list(saves.OUTCOME_NAMES[1:])
    assert wire[saves.LIMIT] == "limit"
    assert wire[saves.GRANTED] == "granted"
