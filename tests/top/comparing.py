"""Compares the monitor's outputs with the truth, and reads each output as its users read it."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families
from truth import gb

LEVELS = ("info", "warn", "bad")


class Comparison:
    """The differences between some outputs and the truth, one line each.

    Args:
        truth: What the outputs should show.
        target: The required bytes/s per GPU.
    """

    def __init__(self, truth, target):
        self.truth, self.target = truth, target
        self.differences = []

    def same(self, where, shown, wanted):
        if shown != wanted:
            self.differences.append(f"{where}: {shown!r} is shown, not {wanted!r}")

    def one_of(self, where, shown, wanted):
        if shown not in wanted:
            self.differences.append(f"{where}: {shown!r} is shown, not one of {wanted!r}")

    def holds(self, where, shown, bounds, slack=0.0):
        if not bounds.holds(shown, slack):
            self.differences.append(f"{where}: {shown!r} is shown, not {bounds}")

    def matches(self, where, shown, pattern):
        if not re.match(pattern, shown):
            self.differences.append(f"{where}: {shown!r} is shown, not {pattern!r}")

    # --- JSON ------------------------------------------------------------------------------------------------------

    def json(self, tick):
        truth = self.truth
        counts = [truth.counts(job) for job in truth.shown]
        node = tick["node"]["ranks"], tick["node"]["alive"]
        self.same("node", node, tuple(map(sum, zip(*counts, strict=True))))
        self.same("jobs", [job["key"] for job in tick["jobs"]], [truth.key(job) for job in truth.shown])
        named = [(truth.key(one.operation.job), one.kind, one.label) for one in truth.operations]
        self.same("ops", [(op["job"], op["op"], op["label"]) for op in tick["ops"]], named)
        wanted = [row for job in truth.shown for row in truth.rows(job)]
        shown = [row for job in tick["jobs"] for row in tick["ranks"] if row["job"] == job["key"]]
        self.same("rows", [row["pid"] for row in shown], [row.process.pid for row in wanted])
        if self.differences:
            return
        for told, job in zip(tick["jobs"], truth.shown, strict=True):
            self._json_job(told, job)
        for told, one in zip(tick["ops"], truth.operations, strict=True):
            self._json_operation(told, one, next(job for job in tick["jobs"] if job["key"] == told["job"]))
        for told, row in zip(shown, wanted, strict=True):
            self._json_row(told, row)

    def _json_job(self, told, job):
        where, safe = told["key"], self.truth.safe(job)
        counts = told["ranks"], told["alive"], told["gpus"]
        self.same(f"{where} counts", counts, (*self.truth.counts(job), self.truth.gpus(job)))
        self.same(f"{where} active", told["active"], any(one.running for one in self.truth.of(job)))
        labels = {place: one["label"] for place, one in told["safe"].items()}
        self.same(f"{where} safe", labels, {place: label for place, (label, _) in safe.items()})
        for place, (_, when) in safe.items():
            if place in labels:
                self.holds(f"{where} safe {place}", told["safe"][place]["t"], when, 0.001)

    def _json_operation(self, told, one, job):
        where = f"{told['job']} {one.kind} {one.label}"
        facts = {
            "step": one.step, "running": one.running, "phase": one.phase, "ranks": len(one.parts),
            "missing": one.missing, "gpus": one.gpus, "linked": one.linked, "failed": one.failed,
        }  # fmt: skip
        self.same(where, {name: told[name] for name in facts}, facts)
        self.holds(f"{where} bytes", told["bytes"], one.total)
        self.holds(f"{where} done", told["done"], one.done)
        if one.average:
            self.holds(f"{where} average", told["avg_Bps"], one.average, 1.0)
        said, wanted = told["sentence"], one.said(self.target, self.truth.safely(one, job))
        if wanted is not None:
            self.matches(f"{where} sentence", f"{said['level']}: {said['text']}" if said else "", ": ".join(wanted))
        elif said is not None:
            self.one_of(f"{where} sentence", said["level"], LEVELS[:2])
        if not one.running:
            verdicts = {"ok"} if one.average and one.reaches(self.target) else {"near", "slow"}
            self.one_of(
                f"{where} verdict", told["verdict"], {"failed"} if one.failed else verdicts if one.average else {None}
            )

    def _json_row(self, told, row):
        process, part = row.process, row.part
        where = f"{process.job.name} {process.pid} {row.operation.kind} {row.operation.label}"
        facts = {
            "rank": process.rank, "alive": process.alive, "op": row.operation.kind, "label": row.operation.label,
            "running": part.outcome == "running",
        }  # fmt: skip
        self.same(where, {name: told[name] for name in facts}, facts)
        self.one_of(f"{where} state", told["state"], row.states)
        size = part.told.get("copied" if row.operation.kind == "drain" else "written")
        if size is not None:
            self.same(f"{where} bytes", (told["bytes"], told["done"]), (size, size))
        elif not 0 <= told["done"] < part.size:
            self.same(f"{where} done", told["done"], f"less than {part.size}")

    # --- the table and --check ---------------------------------------------------------------------------------------

    def table(self, words):
        truth = self.truth
        head, *rest = words.splitlines()
        counts = [truth.counts(job) for job in truth.shown]
        alive, ranks = sum(alive for _, alive in counts), sum(ranks for ranks, _ in counts)
        self.matches("table", head, f"fastckpt-top .*  {alive} of {ranks} processes alive")
        several = len(truth.shown) > 1
        blocks = re.split(r"^job ", "\n".join(rest), flags=re.MULTILINE)[several:]
        self.same("table's jobs", len(blocks), len(truth.shown))
        for block, job in zip(blocks, truth.shown, strict=False):
            ranks, alive = truth.counts(job)
            if several:
                pattern = rf"{truth.key(job)}  user \S+  {alive} of {ranks} processes alive  "
                self.matches("table's job", block, pattern)
            self._block(f"table {truth.key(job)}", block, truth.of(job), truth.rows(job))
        self._others("table", rest)

    def _block(self, where, block, operations, wanted):
        lines = [line for line in block.splitlines() if re.match(r"(save|drain) \S+: ", line)]
        self.same(where, [line.split(":")[0] for line in lines], [f"{one.kind} {one.label}" for one in operations])
        for line, one in zip(lines, operations, strict=False):
            self.matches(f"{where} {one.label}", line, rf".*[,:] {one.phase} ")
            self._figures(f"{where} {one.label}", line, one)
        rows = re.findall(r"^ *(\d+|-) +(?:\d+|-) +(\d+) (\S+) +([A-Z]+) ", block, re.MULTILINE)
        ranks = ["-" if row.process.rank is None else str(row.process.rank) for row in wanted]
        named = [(rank, str(row.process.pid), row.operation.kind) for rank, row in zip(ranks, wanted, strict=True)]
        self.same(f"{where} rows", [row[:3] for row in rows], named)
        for (_, pid, _, state), row in zip(rows, wanted, strict=False):
            self.one_of(f"{where} state of {pid}", state.lower(), row.states)

    def _figures(self, where, line, one):
        """The bytes and the average in a line: `0.03 of 0.03 GB`, `average 0.55 of 1.00 GB/s`."""
        if one.empty:
            self.matches(where, line, f".*nothing to write, {gb(one.linked)} GB linked")
        elif one.phase == "done":
            self.matches(where, line, rf".*: {gb(one.done.least)} of {gb(one.total.least)} GB, ")
        if one.average:
            rate = re.search(r"average ([0-9.]+) of", line)
            self.holds(f"{where} average", rate and float(rate[1]) * 1e9, one.average, 6e6)

    def _others(self, where, lines):
        told = [int(line.split()[1]) for line in lines if "died before that" in line]
        self.same(f"{where}: dead of others", told, [self.truth.others] * (self.truth.others > 0))

    def check(self, status, words):
        truth = self.truth
        self.same("status", status, truth.status(self.target))
        lines, judged = words.splitlines(), truth.judged(truth.operations)
        self._others("check", lines)
        lines = lines[: len(lines) - (truth.others > 0)]
        self.same("lines of --check", len(lines), len(judged))
        for line, one in zip(lines, judged, strict=False):
            result = "FAILED" if one.failed else "ok" if one.fine(self.target) else "BELOW TARGET"
            name = f"{truth.key(one.operation.job)} " if len(truth.shown) > 1 else ""
            state = "running" if one.running else one.phase
            self.matches("check", line, re.escape(f"{result}: {name}{one.kind} {one.label} ({state}): "))
            if one.empty:
                self._figures("check", line, one)
            elif not one.copies:
                self.matches("check", line, rf".* \(want 100%\), target custom x {one.gpus} GPUs?(;|$)")
            if one.failed:
                self.matches("check", line.partition("; ")[2], one.said(self.target, "")[1])

    # --- Prometheus --------------------------------------------------------------------------------------------------

    def prometheus(self, page):
        truth, self._samples = (
            self.truth,
            [one for made in text_string_to_metric_families(page) for one in made.samples],
        )
        seen = [process for job in truth.jobs for process in job.processes if process.parts]
        living = [process for process in seen if process.alive]
        self.same("up", self._series("process_up", "pid"), sorted(((str(one.pid),), 1.0) for one in living))
        taken = {(one.job.name, one.rank) for one in living}
        ended = {(one.job.name, one.rank): one for one in seen if one.rank is not None and not one.alive}
        rows = {row.process for job in truth.shown for row in truth.rows(job)}
        told = [*living, *(one for place, one in ended.items() if place not in taken)]
        told += [one for one in seen if one.rank is None and one in rows and one.died]
        died = sorted(((str(one.pid),), float(one.died)) for one in told)
        self.same("died", self._series("process_died", "pid"), died)
        for process in told:
            self._series_of(process)
        for job in truth.shown:
            self._series_of_job(job)

    def _series(self, name, *labels, **chosen):
        made = [one for one in self._samples if one.name == f"fastckpt_{name}" and chosen.items() <= one.labels.items()]
        return sorted((tuple(one.labels[label] for label in labels), one.value) for one in made)

    def _series_of(self, process):
        who = {"job_name": process.job.name, "rank": "" if process.rank is None else str(process.rank)}
        who |= {"pid": str(process.pid)} if process.rank is None else {}
        saves = [part for op, part in process.parts if op.kind == "save" and part.outcome not in ("running", "died")]
        good = sum(part.outcome == "ok" for part in saves)
        for result, count in (("ok", good), ("failed", len(saves) - good)):
            shown = self._series("operations_total", **who, op="save", result=result)
            self.same(f"{who} saves {result}", shown, [((), float(count))])
        saved = [value for _, value in self._series("saved_bytes_total", **who)]
        sizes = sum(part.told.get("written", 0) for part in saves)
        failed = sum(part.size for part in saves if part.outcome != "ok")
        if len(saved) != 1 or not sizes <= saved[0] <= sizes + failed:
            self.same(f"{who} saved", saved, sizes)
        for last in saves[-1:]:
            told = self._series("last_operation_ok", **who, op="save")
            self.same(f"{who} last", told, [((), float(last.outcome == "ok"))])
            if last.outcome == "ok":
                told = self._series("last_operation_bytes", **who, op="save")
                self.same(f"{who} last bytes", told, [((), float(last.told["written"]))])
                ((_, took),) = self._series("last_operation_duration_seconds", **who, op="save") or [(None, 0.0)]
                if "seconds" in last.told and not last.told["least"] <= took <= last.told["seconds"]:
                    self.same(f"{who} last took", took, last.told["seconds"])

    def _series_of_job(self, job):
        who, truth = {"job_name": job.name}, self.truth
        target = self._series("target_bytes_per_second", **who, op="save")
        self.same(f"{job.name} target", target, [((), pytest.approx(self.target * truth.gpus(job)))])
        wanted = [one.said(self.target, "") for one in truth.judged(truth.of(job))]
        if None not in wanted:
            gravest = max((level for level, _ in wanted), key=LEVELS.index)
            levels = [labels for labels, value in self._series("job_level", "level", **who) if value]
            self.same(f"{job.name} level", levels, [(gravest,)])
        places = [place for (place,), _ in self._series("last_safe_timestamp_seconds", "place", **who)]
        self.same(f"{job.name} safe", places, sorted(truth.safe(job)))

    # --- the screen --------------------------------------------------------------------------------------------------

    def screens(self, live, history):
        """Compare each job's screen, found by the job's name and one of its pids, and the history."""
        truth, jobs = self.truth, []
        for screen in live:
            name, pid = re.search(r"─ fastckpt-top · \S+ · (\S+?)\((\d+)\)", screen).groups()
            of = (job for job in truth.shown if job.name == name and int(pid) in [one.pid for one in job.processes])
            jobs.append(next(of, None))
        launches = [job.launch if job is not None else 0 for job in jobs]
        self.same("screen's jobs", sorted(launches), sorted(job.launch for job in truth.shown))
        if sorted(launches) == sorted(job.launch for job in truth.shown):
            for screen, job in zip(live, jobs, strict=True):
                self._screen(f"screen of {job.name}", screen, job)
        lines = re.findall(r"^│ \S \S+ (save|drain) +(\S+) (.*)│$", history, re.MULTILINE)
        ends = [re.search(r"died|failed: \S+", line[2]) for line in lines]
        shown = [(*line[:2], end[0] if end else "") for line, end in zip(lines, ends, strict=True)]
        past = [(one.kind, one.label, one.how) for one in truth.past]
        self.same("history", shown, past[: len(shown)])
        self.one_of("lines of history", len(shown), [len(past)] if len(past) < 50 else range(50, len(past) + 1))

    def _screen(self, where, screen, job):
        one = self.truth.of(job)[0]
        ranks, alive = self.truth.counts(job)
        border, first, *_ = screen.splitlines()
        told = re.findall(r" (\d+) of (\d+) ranks?\b", border)
        self.same(f"{where} alive", told, [(str(alive), str(ranks))] * (alive != ranks))
        self.matches(where, first, rf"│ done   {one.kind.upper()} +{one.label} +{one.phase.upper()} ")
        if one.phase == "done" and not one.empty:
            self.matches(where, first, rf".* {gb(one.done.least)}/{gb(one.total.least)} GB ")
        rows = re.findall(r"^│ (?:.)(?:.) *(?:\d+) +(?:\d+|-) +(\d+) ([A-Z]+) ", screen, re.MULTILINE)
        shown = [(int(pid), state.lower()) for pid, state in rows]
        for row in self.truth.rows(job):
            found = next((each for each in shown if each[0] == row.process.pid and each[1] in row.states), None)
            if found is None:
                self.same(f"{where} row of {row.process.pid}", shown, row.states)
            else:
                shown.remove(found)
        # A process that ended while the monitor ran stays in the table for a while.
        gone = {one.pid for one in job.processes if not one.alive and not self.truth.again(one)}
        self.same(f"{where} more rows", [row for row in shown if row[0] not in gone or row[1] != "exit"], [])
