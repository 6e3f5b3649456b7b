"""The checkpoints of one run. Users call ``manager.py``, which delegates each decision to one part.

``directory`` and ``prefix`` handle names, pins and the file ``latest``, in a directory or below a URL; ``catalogue``
reads the facts in each checkpoint; ``tier`` decides which checkpoints are removed there, and why the rest stay.
``schedule`` applies the policies that choose steps, and ``step_timing`` measures for them. ``saves`` holds the save in
flight, ``after_save`` does the work after a save. ``preemption`` handles signals, ``step_boundary`` the work between
two steps, ``completion`` waiting and the end of a run. ``candidates`` finds the checkpoints to restore, and ``restore``
loads one. Common decisions of ranks, and messages about a rank that left, go through ``crew``. ``drain`` copies to the
remote tier; ``remote`` decides which checkpoints it holds, and fetches them.
"""
