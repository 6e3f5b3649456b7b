"""How fast checkpoints are saved and loaded in a directory: ``fastckpt bench DIR``.

:mod:`command` takes the options and answers; :mod:`shapes` knows what each rank saves and :mod:`room` whether it fits;
:mod:`rounds` says what is done in which order, by processes that :mod:`ranks` starts and that run :mod:`rank`;
:mod:`raw` moves the same bytes plainly, :mod:`caches` makes files cold and hot; :mod:`scores`, without looking at
anything but the samples, judges them; :mod:`text` and :mod:`picture` show them.
"""
