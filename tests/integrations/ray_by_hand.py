"""A run of Ray Train on this machine, with two workers: it is preempted, ends, and continues as another program.

    PYTHONPATH=tests:tests/integrations python tests/integrations/ray_by_hand.py

It takes two minutes and needs ``ray[train]`` (2.60), which the tests do not install.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import ray
import ray.train
from ray.train.torch import TorchTrainer


def drain():
    """Announce to Ray that this node ends in ten minutes."""
    from ray.core.generated import autoscaler_pb2

    address = ray.get_runtime_context().gcs_address
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline = int(time.time() * 1000) + 600_000
    node = ray.get_runtime_context().get_node_id()
    print("drains:", ray._raylet.GcsClient(address=address).drain_node(node, reason, "test", deadline))


def train(config):
    import torch

    import fastckpt
    from fastckpt.integrations.ray import report

    context = ray.train.get_context()
    leads = context.get_world_rank() == 0
    state = {"weight": torch.zeros(1000)}
    saved, waited = [], [0.0]

    def ask():
        began = time.perf_counter()
        news = ray.train.get_preemption_info()
        waited.append(time.perf_counter() - began)
        return news

    with fastckpt.Manager(f"{context.get_storage().experiment_fs_path}/steps", save_when=5) as manager:
        manager.save_on(notice=ask)
        found = manager.restore(into=state)
        began = found.step if found else 0
        step = began
        for step in range(began + 1, config["steps"] + 1):
            state["weight"] += 1
            if step == config["drains"] and leads:
                drain()
            if step > config["drains"] > 0:
                time.sleep(0.5)
            if manager.save(step, state):
                saved.append(step)
            report({"step": step, "began": began, "saved": saved, "ms": 1000 * sum(waited) / len(waited)}, manager)
    report({"step": step, "began": began, "saved": saved, "weight": float(state["weight"][0])}, manager)


def main():
    with tempfile.TemporaryDirectory() as place:
        ray.init(num_cpus=2, include_dashboard=False)
        for steps, drains in ((12, 0), (45, 13)):
            trainer = TorchTrainer(
                train,
                train_loop_config={"steps": steps, "drains": drains},
                scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
                run_config=ray.train.RunConfig(
                    storage_path=place,
                    name="run",
                    checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
                ),
            )
            result = trainer.fit()
            print("metrics:", result.metrics)
            print("checkpoint:", result.checkpoint)
            print("there:", sorted(one.name for one in Path(place, "run", "steps").iterdir()))
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
