"""The objects below one URL, through the package obstore."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any, NamedTuple, TypeVar

import numpy as np

_T = TypeVar("_T")

#: Bytes of one request: enough that its latency is small beside its transfer, and few to send again.
PART = 8 << 20
#: Up to this size an object is written by one request.
WHOLE = 2 * PART
#: Parts of one object that are sent at the same time.
_AT_ONCE = 8
#: The most parts of an object: S3 allows 10,000.
_MOST_PARTS = 9_000

#: A part may take long over a slow, shared network; a server that does not answer is noticed soon.
_CLIENT = {"connect_timeout": "5 seconds", "read_timeout": "120 seconds", "timeout": "600 seconds"}
#: Retries take about three seconds if a server refuses, and half a minute if none answers.
_RETRY = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
#: The prefixes of each store's environment variables.
_PREFIX = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}
#: The connection options that the environment may set, after that prefix and in capitals.
_OPTIONS = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "http1_only",
    "http2_keep_alive_interval",
    "http2_keep_alive_timeout",
    "http2_keep_alive_while_idle",
    "http2_max_frame_size",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "read_timeout",
    "timeout",
    "user_agent",
)

# In a URL in a message, the part after the path may be a signature, and the part before an @ a password.
_query = re.compile(r"(\bhttps?://[^\s?]*)\?\S*")
_user = re.compile(r"(\bhttps?://)[^\s/]*@")

_refused = re.compile(r"status code: 40[13]\b")
#: Answers of a store that does not support conditions.
_unknown = re.compile(r"status code: 501\b|NotImplemented")

_memories: dict[str, Any] = {}
_lock = threading.Lock()
_process: int | None = None


class Version(NamedTuple):
    """An object as it was read.

    Attributes:
        content: its bytes.
        tag: the store's name for this content, for comparisons; empty if it has none.
    """

    content: bytes
    tag: dict[str, str]


class Objects:
    """The objects whose names begin with one URL and a slash.

    Names are relative, with slashes for lower levels. Several threads may call all methods.

    Each raises FileNotFoundError for a missing object, PermissionError if the store refuses, and another OSError for
    any other failure; each names the operation, the URL and the cause. RuntimeError in a process that was forked from
    one that had used a store: the threads of the store's client are missing there.

    Attributes:
        url: the URL, normalised, with no slash at the end.
    """

    def __init__(self, url: str, store: Any) -> None:
        self.url = url
        self._store = store
        scheme, _, rest = url.partition("://")
        self._prefix = rest.partition("/")[2]
        # Azure allows no hyphen in the name of metadata.
        self._note = "fastckpt_crc64" if scheme == "az" else "fastckpt-crc64"

    @classmethod
    def at(cls, operation: str, url: str) -> Objects:
        """The objects below ``url``, which :func:`fastckpt._stores.urls.place_of` has checked.

        Endpoint and credentials come from the environment (docs/stores.md). This sends nothing.

        Args:
            operation: the name of the operation, for messages.
            url: the URL above the objects.

        Raises:
            ImportError: the package obstore is missing.
            ValueError: the environment is incomplete, or the client does not understand it.
        """
        try:
            import obstore.store as stores  # noqa: PLC0415 - an extra, and 40 ms of import
        except ImportError as error:
            raise ImportError(
                f'{operation}: {url!r} requires the package obstore: pip install "fastckpt-io[remote]"'
            ) from error
        scheme, _, rest = url.partition("://")
        root = rest.partition("/")[0]
        if scheme == "memory":
            with _lock:
                return cls(url, _memories.setdefault(root, stores.MemoryStore()))
        # A client with options reads none from the environment.
        said = {name: os.environ.get(f"{_PREFIX[scheme]}_{name.upper()}") for name in _OPTIONS}
        client = {**_CLIENT, **{name: text for name, text in said.items() if text}}
        more = {}
        if scheme == "s3" and "AWS_CHECKSUM_ALGORITHM" not in os.environ:
            more["checksum_algorithm"] = "CRC64NVME"
        try:
            store = stores.from_url(f"{scheme}://{root}", client_options=client, retry_config=_RETRY, **more)  # type: ignore[call-overload]
        except Exception as error:  # noqa: BLE001 - one class for each kind of store
            raise ValueError(f"{operation}: cannot use {url!r}: {_said(error)} (docs/stores.md)") from None
        return cls(url, store)

    def below(self, name: str) -> Objects:
        """The objects below ``name``."""
        return Objects(f"{self.url}/{name}", self._store)

    def children(self) -> tuple[list[str], dict[str, int]]:
        """One level, sorted: the names that have objects below them, and the objects here with their sizes in bytes.

        Both are empty if nothing is there.
        """
        import obstore  # noqa: PLC0415

        found = self._try("list", "", lambda: obstore.list_with_delimiter(self._store, self._prefix or None))
        cut = len(self._prefix) + 1 if self._prefix else 0
        names = sorted(prefix.rstrip("/")[cut:] for prefix in found["common_prefixes"])
        return names, self._sized(found["objects"])

    def sizes(self) -> dict[str, int]:
        """All objects below, with their sizes in bytes, sorted by name."""
        import obstore  # noqa: PLC0415

        return self._sized(self._try("list", "", lambda: obstore.list(self._store, self._prefix or None).collect()))

    def size(self, name: str) -> int:
        """Bytes of an object."""
        import obstore  # noqa: PLC0415

        size: int = self._try("look at", name, lambda: obstore.head(self._store, self._key(name)))["size"]
        return size

    def sum_of(self, name: str) -> str | None:
        """The CRC-64/NVME that :meth:`write` stored with an object, as 16 hexadecimal digits; None if there is none."""
        import obstore  # noqa: PLC0415

        options: Any = {"head": True}
        attributes = self._try(
            "look at", name, lambda: obstore.get(self._store, self._key(name), options=options).attributes
        )
        found = attributes.get(self._note)
        return None if found is None else str(found)

    def read(self, name: str, start: int, length: int) -> Any:
        """``length`` bytes of an object, beginning at ``start``, as a buffer; fewer if the object ends before."""
        import obstore  # noqa: PLC0415

        def get() -> Any:
            try:
                return obstore.get_range(self._store, self._key(name), start=start, length=length)
            except FileNotFoundError:
                raise
            except Exception as error:
                # Each store reports a range that begins after the end in its own way, but all mention the range.
                if "range" in str(error).lower() and obstore.head(self._store, self._key(name))["size"] <= start:
                    return b""
                raise

        return self._try("read", name, get) if length else b""

    def read_all(self, name: str, most: int) -> bytes:
        """A whole object in one request.

        Raises:
            OSError: with EFBIG, it has more than ``most`` bytes.
        """
        return self.read_version(name, most).content

    def read_version(self, name: str, most: int) -> Version:
        """A whole object in one request, with the tag that :meth:`replace` needs.

        Raises:
            OSError: with EFBIG, it has more than ``most`` bytes.
        """
        import obstore  # noqa: PLC0415

        def get() -> Version:
            found = obstore.get(self._store, self._key(name))
            about = found.meta
            if about["size"] > most:
                raise OSError(errno.EFBIG, f"{about['size']} bytes are more than the {most} allowed")
            tag = {part: text for part in ("e_tag", "version") if (text := about[part])}
            return Version(found.bytes().to_bytes(), tag)

        return self._try("read", name, get)

    def read_into(self, name: str, ranges: Sequence[tuple[int, memoryview]]) -> None:
        """Fill memory with ranges of an object, in parallel.

        Args:
            name: the object.
            ranges: the start of each in the object, and its memory: writable, contiguous bytes.

        Raises:
            OSError: with EIO, a range reaches beyond the end of the object.
        """
        parts = [
            (start + offset, memory[offset : offset + PART])
            for start, memory in ranges
            for offset in range(0, len(memory), PART)
        ]

        def fill(part: tuple[int, memoryview]) -> None:
            start, memory = part
            data = self.read(name, start, len(memory))
            if len(data) != len(memory):
                raise self._error("read", name, errno.EIO, f"it ends at byte {start + len(data)}")
            # numpy lets other threads run meanwhile.
            np.copyto(np.frombuffer(memory, np.uint8), np.frombuffer(data, np.uint8))

        if len(parts) == 1:
            fill(parts[0])
        elif parts:
            with ThreadPoolExecutor(min(_AT_ONCE, len(parts)), "fastckpt") as pool:
                for _ in pool.map(fill, parts):
                    pass

    def write(self, name: str, chunks: Iterable[Any], size: int, crc: str | None) -> None:
        """Make an object from ``chunks``, replacing one of this name; it exists only once it is whole.

        S3 gets the CRC-64/NVME of the sent bytes, checks it, and stores it.

        Args:
            name: the object.
            chunks: the content, one buffer after another. No buffer is used after the next is requested. Errors of
                ``chunks`` are raised here, and the object is not made.
            size: bytes in all.
            crc: the CRC-64/NVME of all bytes, as 16 hexadecimal digits, to be stored with the object for
                :meth:`sum_of`; it is not checked here. None to store none.

        Raises:
            ValueError: there are more or fewer bytes than ``size``; the object is not made.
        """
        import obstore  # noqa: PLC0415

        attributes: Any = None if crc is None else {self._note: crc}
        raised: list[BaseException] = []
        part = size if size <= WHOLE else max(PART, -(-size // _MOST_PARTS))
        pieces = _repacked(chunks, size, part, f"write {self.url}/{name}", raised)
        key = self._key(name)

        def put() -> None:
            if size <= part:
                data = next(iter([*pieces]), b"")
                obstore.put(self._store, key, data, attributes=attributes, use_multipart=False)
            else:
                obstore.put(self._store, key, pieces, attributes=attributes, chunk_size=part, max_concurrency=_AT_ONCE)

        try:
            self._try("write", name, put)
        except BaseException:
            if raised:
                raise raised[0] from None
            raise

    def replace(self, name: str, content: bytes, crc: str, before: Version | None) -> None:
        """Make an object from ``content`` by one request, if the current one is still ``before`` (None: no object).

        The store compares and writes in one step. If a store cannot do that, the object is first read.

        Args:
            name: the object.
            content: its bytes.
            crc: their CRC-64/NVME, as for :meth:`write`.
            before: the result of :meth:`read_version`.

        Raises:
            FileExistsError: an object other than ``before`` is there, or no object; nothing was changed.
        """
        import obstore  # noqa: PLC0415

        attributes: Any = {self._note: crc}
        mode: Any = "create" if before is None else before.tag

        def put(mode: Any) -> None:
            key = self._key(name)
            obstore.put(self._store, key, content, attributes=attributes, use_multipart=False, mode=mode)

        if mode:
            try:
                self._try("write", name, lambda: put(mode))
            except FileNotFoundError:
                if before is None:  # the bucket is missing
                    raise
                raise self._other(name) from None
            except OSError as error:
                if error.errno != errno.ENOTSUP:
                    raise
            else:
                return
        if not self._is_still(name, before):
            raise self._other(name)
        self._try("write", name, lambda: put("overwrite"))

    def _is_still(self, name: str, before: Version | None) -> bool:
        try:
            return self.read_all(name, len(before.content) if before else 0) == (before and before.content)
        except FileNotFoundError:
            return before is None
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            return False

    def _other(self, name: str) -> OSError:
        return self._error("write", name, errno.EEXIST, "it was replaced or removed meanwhile")

    def modified(self, name: str) -> datetime:
        """When an object was written, by the store's clock."""
        import obstore  # noqa: PLC0415

        about = self._try("look at", name, lambda: obstore.head(self._store, self._key(name)))
        return about["last_modified"]

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; missing ones are ignored. The store chooses the order."""
        import obstore  # noqa: PLC0415

        keys = [self._key(name) for name in names]

        def each() -> None:
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    obstore.delete(self._store, key)

        def delete() -> None:
            try:
                obstore.delete(self._store, keys)
            except FileNotFoundError:
                # Some stores report a missing object, and then the results of the other requests are unknown.
                each()

        if keys:
            self._try("remove", "", delete)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _sized(self, found: Iterable[Any]) -> dict[str, int]:
        cut = len(self._prefix) + 1 if self._prefix else 0
        # In the listing of a store that also has directories, a prefix, or an object at the prefix itself, is not an
        # object below it.
        return {
            one["path"][cut:]: one["size"] for one in sorted(found, key=lambda one: one["path"]) if one["path"][cut:]
        }

    def _try(self, what: str, name: str, do: Callable[[], _T]) -> _T:
        """Do a request; errors become those of the operating system."""
        global _process  # noqa: PLW0603 - of this process, whatever stores it uses
        if _process is None:
            _process = os.getpid()
        if _process != os.getpid():
            raise RuntimeError(
                f"cannot {what} {self._where(name)}: this process was forked from one that had used an object store, "
                "whose client does not work here: start the process by spawn, or read in the parent"
            )
        from obstore import exceptions  # noqa: PLC0415

        try:
            return do()
        except FileNotFoundError:
            raise self._error(what, name, errno.ENOENT, "there is no such object or bucket") from None
        except (exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise self._other(name) from None
        except (exceptions.NotSupportedError, NotImplementedError) as error:
            raise self._error(what, name, errno.ENOTSUP, _said(error)) from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise self._error(what, name, errno.EACCES, _said(error)) from None
        except OSError as error:
            if error.filename is not None:  # it has the complete message
                raise
            raise self._error(what, name, error.errno or errno.EIO, error.strerror or _said(error)) from None
        except (exceptions.BaseError, ValueError) as error:
            said = _said(error)
            raise self._error(what, name, _number(said), said) from None

    def _where(self, name: str) -> str:
        return f"`{self.url}/{name}`" if name else f"`{self.url}`"

    def _error(self, what: str, name: str, number: int, why: str) -> OSError:
        return OSError(number, f"cannot {what} {self._where(name)}: {why}", f"{self.url}/{name}".rstrip("/"))


def _said(error: BaseException) -> str:
    """The message of a client's error, in one line, without internals, signatures and passwords."""
    text = " ".join(str(error).partition("\n\nDebug source:")[0].split())
    if "builder error" in text:
        text += " (for an http:// endpoint set AWS_ALLOW_HTTP=true)"
    return _user.sub(r"\1", _query.sub(r"\1", text))


def _number(said: str) -> int:
    """The number of an error for which the client has no class, as for listings."""
    if "NoSuchBucket" in said:
        return errno.ENOENT
    if _unknown.search(said):
        return errno.ENOTSUP
    return errno.EACCES if _refused.search(said) else errno.EIO


def _repacked(
    chunks: Iterable[Any], size: int, part: int, what: str, raised: list[BaseException]
) -> Iterator[memoryview]:
    """The bytes of ``chunks`` in pieces of ``part`` bytes, of which the last may have fewer.

    The client reads ahead while it sends: each piece has its own memory.
    """
    done = 0
    try:
        piece, filled = np.empty(min(part, size), np.uint8), 0
        for chunk in chunks:
            data = np.frombuffer(chunk, np.uint8) if memoryview(chunk).nbytes else np.empty(0, np.uint8)
            done += len(data)
            if done > size:
                raise ValueError(f"{what}: it has more than the {size} bytes announced")  # noqa: TRY301
            while len(data):
                taken = data[: len(piece) - filled]
                piece[filled : filled + len(taken)] = taken
                filled += len(taken)
                data = data[len(taken) :]
                if filled == len(piece):
                    yield piece.data
                    piece, filled = np.empty(min(part, size), np.uint8), 0
        if done < size:
            raise ValueError(f"{what}: there are {done} bytes, and {size} were announced")  # noqa: TRY301
        if filled:
            yield piece[:filled].data
    except BaseException as error:
        raised.append(error)
        raise
