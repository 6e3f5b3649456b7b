"""The checkpoints of one run. ``manager.py`` is what users call: it owns parts, and each part owns one decision.

``directory`` and ``prefix`` know names, pins and the file ``latest``, in a directory or below a URL; ``catalogue`` what
each checkpoint says of itself; ``tier`` what is removed in such a place, and why the rest stays. ``schedule`` asks the
policies which steps are saved, and ``step_timing`` measures for them. ``saves`` has the save in flight, ``after_save``
what follows one. ``preemption`` says what a signal does, ``step_boundary`` what happens between two steps,
``completion`` how a run waits, and ends. ``candidates`` finds what may be restored, and ``restore`` loads it. What
ranks decide alike, and what they hear of one that has left, goes through ``ranks``. ``drain`` copies to the remote
tier; ``remote`` says what that is to hold, and brings checkpoints back.
"""
