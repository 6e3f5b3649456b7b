"""The checkpoints of one run: ``manager.py`` is what users call, the others own one decision each.

``directory`` knows names, pins and the file ``latest``; ``catalogue`` what each checkpoint says of itself;
``run`` tells what is there and why; ``retention`` which of them go; ``step_timing`` measures what policies ask about;
``schedule`` asks these policies; ``step_boundary`` is what happens between two steps; ``signals`` hears that the end is
near, and ``preemption`` saves before it; ``restore`` finds what can be loaded. What all ranks of a job must decide
alike goes through ``ranks``, and what saves and loads their states through ``calls``.
"""
