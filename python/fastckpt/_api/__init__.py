"""The public functions: their arguments, their reports, and the order of the steps behind them."""

from fastckpt import _core, _crc64
from fastckpt._namesake import warn_of_namesake

# The check is here, and not in fastckpt/__init__.py, which the other distribution may have overwritten: importing
# fastckpt.distributed or fastckpt.dcp runs this file, too.
warn_of_namesake()
_crc64.use(_core.crc64, _core.crc64_joined)
