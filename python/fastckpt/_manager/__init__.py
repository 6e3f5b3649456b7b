"""The checkpoints of one run. Users call ``manager.py``: it owns parts, and each part owns one decision.

``directory`` and ``prefix`` handle names, pins and the file ``latest``, in a directory or below a URL; ``catalogue``
reads the facts that each checkpoint holds; ``tier`` decides what is removed in such a place, and why the rest stays.
``schedule`` asks the policies which steps are saved, and ``step_timing`` measures for them. ``saves`` holds the save in
flight, ``after_save`` does the work after one. ``preemption`` handles signals, ``step_boundary`` the work between two
steps, ``completion`` waiting and the end of a run. ``candidates`` finds the checkpoints to restore, and ``restore``
loads one. Decisions that ranks share, and news of one that has left, go through ``ranks``. ``drain`` copies to the
remote tier; ``remote`` decides what it holds, and fetches checkpoints.
"""
