"""One rank of a scenario: saves and loads on requests from its standard input, one JSON object per line.

Each request has `do`, which is `save` or `load`, and `io`, the options of a `fastckpt.IO`; the rest are arguments of
that function. The rank answers each request with one line.
"""

from __future__ import annotations

import json
import sys

import fastckpt
import numpy as np

LAYERS = 16


def main() -> None:
    """Serve requests until the input ends. The argument is the size of the state in bytes."""
    layer = int(sys.argv[1]) // LAYERS
    state = {f"layers.{index}.weight": np.full(layer, index, np.uint8) for index in range(LAYERS)}
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        order["io"] = fastckpt.IO(**order["io"])
        try:
            if order.pop("do") == "save":
                fastckpt.save(state, **order)
            else:
                fastckpt.load(into=state, **order)
        except OSError as error:
            print(f"failed: {error}", flush=True)
        else:
            print("done", flush=True)


if __name__ == "__main__":
    main()
