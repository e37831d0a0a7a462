"""Goal: docs/metrics.md is what the code makes, and says something about every label.

Method: compare the page with one made now; look each label and each value of the live metrics up in it.
"""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvtierd.service.metrics import Metrics
from kvtierd.service.metrics_reference import OPEN_LABELS, reference

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_up_to_date() -> None:
    assert DOC.read_text() == reference(), "run make docs"


def test_every_label_and_closed_value_is_explained() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", reference().partition("## Labels")[2], re.M))
    for family in Metrics(CollectorRegistry()).collect():
        for sample in family.samples:
            for label, value in sample.labels.items():
                if label == "le":
                    continue
                assert label in rows, f"{label} of {family.name}"
                assert label in OPEN_LABELS or f"`{value}`" in rows[label]


def test_every_metric_says_what_it_is_in_a_sentence() -> None:
    for family in Metrics(CollectorRegistry()).collect():
        assert re.fullmatch(r"[A-Z0-9].+[.]", family.documentation), family.name
