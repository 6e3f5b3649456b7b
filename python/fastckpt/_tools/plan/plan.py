"""The plan of a job's checkpoints: one pure function."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fastckpt import _interval as formulas
from fastckpt import _units as units
from fastckpt._paths import AnyPath

# The tiers are outside this package, because the benchmark uses them, too.
from fastckpt._tools.tiers import TIERS, Tier

from . import architectures, sizing
from .layout import Share, check, layout
from .record import Plan, Verdict

#: The least MTTF of one GPU, as :data:`fastckpt._interval.LEAST_MTTF` is for the cluster.
_LEAST_MTTF_GPU = 1e6

#: NVIDIA's guidance: checkpoints, with all their costs, should take less than 5 % of training.
GOODPUT = 0.95


def plan(  # noqa: PLR0913 - each is one thing to know about a job
    *,
    params: float | str | None = None,
    config: str | os.PathLike[str] | None = None,
    checkpoint: AnyPath | None = None,
    size: float | str | None = None,
    expert_params: float | str | None = None,
    weights: str = "bf16",
    master: str | None = None,
    optimizer: str = "adamw",
    gpus: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    ep: int = 1,
    zero: int | None = None,
    gpus_per_node: int = 8,
    max_in_flight: int = 1,
    mttf_gpu: float | str | None = None,
    mttf_cluster: float | str | None = None,
    goodput: float | str | None = None,
    overhead: float | str | None = None,
    interval: float | str | None = None,
    write: float | str | None = None,
    read: float | str | None = None,
    node_write: float | str | None = None,
    node_read: float | str | None = None,
    tier: str | None = None,
    target_seconds: float | str | None = None,
    stall: float | str | None = None,
    restart: float | str | None = None,
) -> Plan:
    """Calculate the size of checkpoints, the interval between them, and the speed that the storage needs.

    Numbers are bytes, bytes per second and seconds, or strings with units: ``"405B"`` parameters, ``"13.8TB"``,
    ``"124min"``, ``"273GB/s"``, ``"95%"``.

    >>> import fastckpt
    >>> job = fastckpt.tools.plan(size="13.8TB", tp=8, pp=64, dp=6, write="273GB/s", interval="4h")
    >>> job.writers, round(job.write_per_gpu / 1e9, 2), round(job.restore_rate / 1e9)
    (512, 0.53, 1638)

    Args:
        params: parameters of the model; or give one of the next three.
        config: a Hugging Face ``config.json``, or its directory, to count the parameters from.
        checkpoint: a checkpoint of fastckpt, whose files give the size.
        size: bytes of a checkpoint.
        expert_params: the number of ``params`` in routed experts; required with ``ep``, known from ``config``.
        weights: precision of the weights: ``fp32``, ``bf16``, ``fp16``, ``fp8``.
        master: precision of master weights: ``fp32``, ``bf16``, ``none``; by default fp32, and none for fp32 weights or
            without an optimizer.
        optimizer: ``adamw``, ``adam``, ``adam8bit``, ``sgd``, ``lion``, ``muon``, ``adafactor``, ``none``.
        gpus: all GPUs.
        tp: tensor parallelism.
        pp: pipeline parallelism.
        dp: data parallelism; by default the remaining factor of the GPUs.
        ep: expert parallelism, a divisor of data parallelism.
        zero: ZeRO stage 0 to 3; by default 0 with ``tp`` or ``pp``, else 3 (FSDP).
        gpus_per_node: GPUs of a node, and so its ranks.
        max_in_flight: the most saves in the background at a time, as for ``IO(max_in_flight=)``: each needs memory.
        mttf_gpu: mean time to failure of a GPU, seconds or a string with a unit; ``"50000h"`` by default.
        mttf_cluster: mean time to failure of the whole cluster instead.
        goodput: the share of the time that training should get; the interval is then ``(1 - goodput) * mttf``.
        overhead: the share of time for which checkpoints may stop training; the interval is then ``stall / overhead``.
        interval: seconds from the start of one checkpoint to the next. Without any of these three, the best interval.
        write: total bytes per second that the storage writes.
        read: bytes per second that it reads; the same as ``write`` by default.
        node_write: bytes per second that one node writes, measured there; the slower of the two counts.
        node_read: bytes per second that one node reads; the same as ``node_write`` by default.
        tier: ``light``, ``medium`` or ``high``: a rate per GPU instead of a speed. ``light`` if no speed is given.
        target_seconds: the most seconds for a checkpoint; sets the required speed if no speed is given, else the limit
            for the verdicts.
        stall: seconds for which a checkpoint stops training, if it is written in the background; by default its whole
            duration.
        restart: seconds to notice a failure and restart, without the time for reading; 0 by default.

    Returns:
        The plan; printed, it is the table of ``fastckpt plan``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range, contradicts another, or is impossible.
    """
    parameters, each, held, notes = _held(params, config, checkpoint, size, expert_params, weights, master, optimizer)
    where = layout(gpus, tp=tp, pp=pp, dp=dp, ep=ep, zero=zero)
    check(gpus_per_node=gpus_per_node, max_in_flight=max_in_flight)
    if ep > 1 and not held.expert_weights:
        raise ValueError(
            "plan: expert parallelism requires the expert parameters: give config=, or params= and expert_params="
        )
    shares, restore_bytes = where.shares(held), where.bytes_to_restore(held)
    target = None if target_seconds is None else units.seconds("target_seconds", target_seconds)
    rates = {"write": write, "read": read, "node_write": node_write, "node_read": node_read}
    job = _Moves(where.gpus, min(gpus_per_node, where.gpus), shares, held.bytes, restore_bytes)
    seconds, reading, said = _speed(job, rates, tier, target)
    standing = seconds if stall is None else units.seconds("stall", stall)
    if standing > seconds:
        raise ValueError(f"plan: stall {standing:g} s is longer than the checkpoint takes, {seconds:.3g} s")
    mttf = mttf_of(mttf_gpu, mttf_cluster, where.gpus)
    rule = _rule(goodput, overhead, interval)
    every = rule.interval(standing, mttf)
    if every < seconds:
        notes.append(
            f"a checkpoint takes {units.show_seconds(seconds)}, but one starts every {units.show_seconds(every)}: "
            "saves cannot keep up"
        )
    away = 0.0 if restart is None else units.seconds("restart", restart)
    verdicts = tuple(
        _verdict(tier, rule, mttf, away, target, stall=None if stall is None else standing, times=times)
        for tier in TIERS.values()
        for times in [job.at_tier(tier)]
    )
    return Plan(
        bytes=held.bytes,
        parameters=parameters,
        bytes_per_parameter=each,
        layout=where,
        gpus_per_node=gpus_per_node,
        max_in_flight=max_in_flight,
        shares=shares,
        write=held.bytes / seconds,
        read=restore_bytes / reading,
        speed=said,
        seconds=seconds,
        stall=standing,
        mttf=mttf,
        goodput_wanted=rule.goodput,
        interval=every,
        interval_rule=rule.words,
        interval_goodput=formulas.goodput_rule(rule.goodput, mttf),
        interval_young=formulas.young(standing, mttf) + standing,
        interval_daly=formulas.daly(standing, mttf) + standing,
        interval_best=formulas.best_interval(standing, mttf, away),
        restore_bytes=round(restore_bytes),
        restore_seconds=reading,
        restart=away,
        verdicts=verdicts,
        notes=tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class _Rule:
    """The rule for the interval: a goodput, an overhead, a number, or the best."""

    name: str
    value: float
    goodput: float

    def interval(self, stall: float, mttf: float) -> float:
        """Seconds from the start of one checkpoint to the start of the next."""
        if self.name == "goodput":
            return formulas.goodput_rule(self.value, mttf)
        if self.name == "overhead":
            return stall / self.value
        return self.value if self.name == "interval" else formulas.best_interval(stall, mttf)

    @property
    def words(self) -> str:
        """The rule in words."""
        if self.name in ("goodput", "overhead"):
            return f"for {units.show_share(self.value)} {self.name}"
        return "given" if self.name == "interval" else "the best"


def _rule(goodput: float | str | None, overhead: float | str | None, interval: float | str | None) -> _Rule:
    """The one rule that was requested."""
    named = {"goodput": goodput, "overhead": overhead, "interval": interval}
    given = [name for name, value in named.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"plan: give only one of goodput, overhead and interval, not {' and '.join(given)}")
    if goodput is not None:
        wanted = units.fraction("goodput", goodput)
        return _Rule("goodput", wanted, wanted)
    if overhead is not None:
        return _Rule("overhead", units.fraction("overhead", overhead), GOODPUT)
    if interval is not None:
        return _Rule("interval", units.seconds("interval", interval), GOODPUT)
    return _Rule("best", 0.0, GOODPUT)


def _held(
    params: float | str | None,
    config: str | os.PathLike[str] | None,
    checkpoint: AnyPath | None,
    size: float | str | None,
    expert_params: float | str | None,
    weights: str,
    master: str | None,
    optimizer: str,
) -> tuple[int | None, float | None, sizing.Contents, list[str]]:
    """Parameters, bytes each, the contents of a checkpoint, and notes."""
    named = {"params": params, "config": config, "checkpoint": checkpoint, "size": size}
    given = [name for name, value in named.items() if value is not None]
    if len(given) != 1:
        raise ValueError(f"plan: give one of {', '.join(named)}" + (f", not {' and '.join(given)}" if given else ""))
    each = sizing.bytes_per_parameter(weights, master, optimizer)
    if expert_params is not None and params is None:
        raise ValueError("plan: give expert_params only with params: a config names its experts")
    if params is not None:
        count = units.parameters("params", params)
        experts = 0 if expert_params is None else units.parameters("expert_params", expert_params)
        if experts > count:
            raise ValueError(f"plan: give expert_params of at most params, {count:,}, not {experts:,}")
        return count, sum(each), sizing.contents(count, experts, each), []
    if config is not None:
        counted = architectures.read(config)
        held = sizing.contents(counted.parameters, counted.experts, each)
        return counted.parameters, sum(each), held, list(counted.notes)
    known = sizing.checkpoint_bytes(checkpoint) if checkpoint is not None else units.bytes_of("size", size or 0)
    return None, None, sizing.contents(1, 0, each).scaled(known), []


def mttf_of(mttf_gpu: float | str | None, mttf_cluster: float | str | None, gpus: int) -> float:
    """Seconds between failures of the cluster."""
    if mttf_gpu is not None and mttf_cluster is not None:
        raise ValueError("plan: give only one of mttf_gpu and mttf_cluster")
    if mttf_cluster is not None:
        return units.seconds("mttf_cluster", mttf_cluster, formulas.LEAST_MTTF)
    one = units.seconds("mttf_gpu", formulas.MTTF_GPU if mttf_gpu is None else mttf_gpu, _LEAST_MTTF_GPU)
    return formulas.cluster_mttf(one, gpus)


def _tier(name: str) -> Tier:
    if name not in TIERS:
        raise ValueError(f"plan: tier must be one of {', '.join(TIERS)}, not {name!r}")
    return TIERS[name]


@dataclass(frozen=True, slots=True)
class _Moves:
    """The bytes to move, and the ranks that move them."""

    gpus: int
    gpus_per_node: int
    shares: tuple[Share, ...]
    size: int
    restore_bytes: float

    def at_tier(self, tier: Tier) -> tuple[float, float]:
        """Seconds to write and to read back if each GPU gets its tier's rate; only writing GPUs can use it."""
        return self.shares[0].bytes / tier.write / 1e9, self.restore_bytes / self.gpus / tier.read / 1e9

    def at_rates(self, rates: dict[str, float]) -> tuple[float, float]:
        """Seconds at the speed of the whole storage or of a node, whichever is slower."""
        # A node full of the busiest writers ends last; for reads all nodes are equal.
        busiest = min(self.gpus_per_node, self.shares[0].gpus) * self.shares[0].bytes
        reads = self.gpus_per_node * self.restore_bytes / self.gpus
        writing = {"write": self.size, "node_write": busiest}
        reading = {"read": self.restore_bytes, "node_read": reads}
        return (
            max(number / rates[name] for name, number in writing.items() if name in rates),
            max(number / rates[name] for name, number in reading.items() if name in rates),
        )


def _speed(
    job: _Moves, given: dict[str, float | str | None], tier: str | None, target: float | None
) -> tuple[float, float, str]:
    """Seconds of a checkpoint, seconds of reading it back, and the source of these numbers."""
    rates = {name: units.rate(name, value) for name, value in given.items() if value is not None}
    if tier is not None and rates:
        raise ValueError(f"plan: give either a tier or {' and '.join(rates)}, not both")
    if rates and not {"write", "node_write"} & set(rates):
        raise ValueError(f"plan: give write or node_write beside {' and '.join(rates)}")
    if not rates and tier is None and target is not None:
        return target, target, "asked for"
    if not rates:
        said = f"tier {tier}" if tier else "tier light, since no speed is given"
        return *job.at_tier(_tier(tier or "light")), said
    words = [f"{name.replace('_', ' ')} {units.show_rate(rate)}" for name, rate in rates.items()]
    if not {"read", "node_read"} & set(rates):
        words.append("read as written")
        rates.update({name.replace("write", "read"): rate for name, rate in rates.items()})
    return *job.at_rates(rates), ", ".join(words)


def _verdict(
    tier: Tier,
    rule: _Rule,
    mttf: float,
    restart: float,
    target: float | None,
    *,
    stall: float | None,
    times: tuple[float, float],
) -> Verdict:
    """The result for the same job and rule with the storage of a tier."""
    seconds, reading = times
    standing = seconds if stall is None else min(stall, seconds)
    every = rule.interval(standing, mttf)
    reached = formulas.expected_goodput(every, standing, mttf, restart + reading, seconds - standing)
    if target is not None:
        enough, reason = seconds <= target, f"{units.show_seconds(target)} a checkpoint asked for"
    elif every < seconds:
        enough, reason = False, f"a checkpoint starts every {units.show_seconds(every)}"
    else:
        enough, reason = reached >= rule.goodput, f"{units.show_share(rule.goodput)} goodput wanted"
        if formulas.expected_goodput(every, 0.0, mttf, restart) < rule.goodput and rule.name != "best":
            reason += ", the interval is too long"
    return Verdict(
        tier=tier.name,
        write=1e9 * tier.write,
        read=1e9 * tier.read,
        seconds=seconds,
        restore_seconds=reading,
        interval=every,
        goodput=reached,
        enough=enough,
        reason=reason,
    )
