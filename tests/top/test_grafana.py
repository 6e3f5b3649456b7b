"""docs/grafana.json uses metrics of the monitor, and the guide's command writes them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from fastckpt_top import prometheus
from looking import demo
from prometheus_client.parser import text_string_to_metric_families

DOCS = Path(__file__).parents[2] / "docs"
BOARD = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
GUIDE = (DOCS / "monitoring.md").read_text(encoding="utf-8")
PANELS = BOARD["panels"]
#: The labels that Prometheus adds to each sample.
ADDED = {"instance"}
#: Words of PromQL besides names of metrics and labels.
WORDS = {"time", "max", "sum", "count", "rate", "increase", "histogram_quantile", "by", "and", "or", "vector"}


@pytest.fixture(scope="module")
def written():
    """The labels of each metric that the demonstration writes, during and after a save."""
    clock, session = demo()
    found = {}
    for second in (9, 40):
        clock.now = 100.0 + second
        session.tick()
        for family in text_string_to_metric_families(prometheus.render(session.model)):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def asked(expression):
    """The metrics of an expression, each with its label filters, and the labels by which it groups."""
    text = re.sub(r"\[\$__(?:rate_interval|range)\]", "", expression)
    grouped = {name for listed in re.findall(r"\bby \(([^)]*)\)", text) for name in listed.split(", ")}
    rest = re.sub(r"\bby \([^)]*\)", "by", text)
    metrics = {}
    for name, matchers in re.findall(r"(fastckpt_\w+)(?:\{([^}]*)\})?", rest):
        metrics.setdefault(name, set()).update(re.findall(r'(\w+)=~?"', matchers))
    others = set(re.findall(r"[a-z_]\w*", re.sub(r"fastckpt_\w+(\{[^}]*\})?", "", rest))) - WORDS
    assert not others, others
    return metrics, grouped


TARGETS = [
    pytest.param(target["expr"], target["legendFormat"], id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]


@pytest.mark.parametrize(("expression", "legend"), TARGETS)
def test_each_metric_and_label_is_written(written, expression, legend):
    metrics, grouped = asked(expression)
    assert metrics
    assert expression.count("(") == expression.count(")")
    for name, labels in metrics.items():
        assert name in written
        assert labels <= written[name] | ADDED
    # A label that one of two operands lacks would match nothing.
    common = set.intersection(*(written[name] for name in metrics)) | ADDED
    assert grouped <= common
    assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= (grouped or common)


def test_the_variables_ask_for_what_is_written(written):
    defined = {variable["name"] for variable in BOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(PANELS)))
    assert used == defined == {"datasource", "node", "run"}
    for variable in BOARD["templating"]["list"][1:]:
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]["query"]).groups()
        assert metric in written
        assert label in written[metric] | ADDED
        # ".*" also matches series without the label.
        assert variable["allValue"] == ".*"


def test_the_panels_have_places_of_their_own():
    assert len({panel["id"] for panel in PANELS}) == len({panel["title"] for panel in PANELS}) == len(PANELS)
    taken = set()
    for panel in PANELS:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert all(0 <= x < 24 for x, _ in cells)
        taken |= cells


@pytest.mark.parametrize(
    ("number", "groups"), [(0, {"instance"}), (1, {"instance", "job_name"}), (2, {"instance", "job_name", "rank"})]
)
def test_the_alerts_of_the_guide_ask_for_what_is_written(written, number, groups):
    alerts = re.findall(r"^(.*max by .*)$", GUIDE, re.MULTILINE)
    assert len(alerts) == 3
    metrics, grouped = asked(alerts[number])
    assert grouped == groups
    for name, labels in metrics.items():
        assert name in written
        assert labels | groups <= written[name] | ADDED


def test_the_command_of_the_guide_writes_the_file(producer, top, tmp_path):
    (command,) = re.findall(r"^    fastckpt-top (.*--prometheus.*) >/dev/null$", GUIDE, re.MULTILINE)
    arguments = [tmp_path / "x.prom" if word.endswith(".prom") else word for word in shlex.split(command)]
    # Other processes on this machine are not part of the test.
    arguments.remove("--all-users")
    producer()
    done = top(*arguments, "--count", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert 'fastckpt_process_up{job_name="producer",rank="0"' in (tmp_path / "x.prom").read_text()
