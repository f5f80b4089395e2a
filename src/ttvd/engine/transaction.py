"""Transactions: what a call changes becomes visible at its end, all at once, or not at all.

A :class:`Transaction` holds what a module was before a call. It can go back to that, and readers can use it meanwhile.
A :class:`StepLock` decides who reads and who writes: calls that change a module take turns, and readers never wait for
a step.

The end of a transaction is one assignment: the lock forgets the transaction that is open. Whatever raises before that,
at whatever moment, leaves the transaction open, and the module goes back: at once, or, where even that is interrupted,
before its next change. Readers use the state of an open transaction, so they never see a part of a change.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import attrgetter
from types import EllipsisType, MethodType
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from ttvd.engine.acceleration import ThreadModes
from ttvd.engine.flat import Copies, keep_where

R = TypeVar("R")
Kind = Literal["state", "host", "log", "report"]
_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
"""Containers of a module whose content a step may change; hooks come and go with passes that collect features."""


class Place(NamedTuple):
    """Where a tensor is that may change.

    Attributes:
        name: Dotted name of the tensor.
        table: The parameters or buffers of the module that owns it.
        key: Its name there.
        kind: ``"state"`` for a tensor that steps change; ``"host"`` for one that the host changes before a step runs,
            such as a counter; ``"log"`` for a large one with an undo log; ``"report"`` for one outside of the state,
            which tells what the last step did.
    """

    name: str
    table: dict[str, Tensor]
    key: str
    kind: Kind

    @property
    def tensor(self) -> Tensor:
        """The tensor that is there now."""
        return self.table[self.key]


class Renewed:
    """An object that is not copied with its module: the copy of the module starts with a fresh one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


class Layout(Renewed):
    """The places of a module. Every step asks for them, and the search takes a while, so they are kept.

    A layout holds the parts of the module, but not the module itself, which holds the layout.

    Attributes:
        places: The places, parameters first.
        host: Those of the host, by type.
        device: Those that a step changes, without large ones, by type and device.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.set([], [])

    def set(self, parts: list[nn.Module], places: list[Place]) -> None:
        """Remember places.

        Args:
            parts: The module and everything inside of it, as :func:`find_parts` lists them.
            places: The places that were found there.
        """
        self.places = places
        self.host = _group(place for place in places if place.kind == "host")
        self.device = _group(place for place in places if place.kind in ("state", "report"))
        self._parts, self._shape = parts[1:], _measure(parts)

    def fits(self, parts: list[nn.Module]) -> bool:
        """Whether these are still the parts, with as many tensors each, of the same kind."""
        return parts[1:] == self._parts and _measure(parts) == self._shape


def _group(places: Iterable[Place]) -> list[list[Place]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Place]] = {}
    for place in places:
        groups.setdefault((place.tensor.dtype, place.tensor.device), []).append(place)
    return list(groups.values())


def _measure(parts: list[nn.Module]) -> list[object]:
    """Numbers of parameters and buffers, which parameters require gradients, and which memories are large."""
    tables = [part._parameters for part in parts]
    parameters = filter(_is_there, chain.from_iterable(map(dict.values, tables)))
    return [
        *map(len, tables),
        *(len(part._buffers) for part in parts),
        *map(attrgetter("requires_grad"), parameters),
        *(part.is_large for part in parts if isinstance(part, LoggedBuffers)),
    ]


def _is_there(value: object) -> bool:
    return value is not None


class Root(Protocol):
    """The interface of a module with transactions; :class:`~ttvd.engine.state.StatefulModule` has it."""

    lock: "StepLock"

    def find_layout(self, parts: list[nn.Module]) -> Layout:
        """Where the tensors are that may change; ``parts`` are the module and everything inside of it."""

    @property
    def device(self) -> torch.device:
        """The device that the module computes on."""


LARGE = 2**20
"""Bytes of buffers above which they are not copied before a step."""
Index = tuple[Tensor, ...] | EllipsisType


class UndoLog(Renewed):
    """What was in large buffers before it was overwritten.

    Attributes:
        entries: A buffer, where in it, and what was there; None outside of transactions.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[Tensor, Index, Tensor]] | None = None

    def begin(self, nested: bool) -> int:
        """Begin a transaction, and return how many entries there are already.

        A recorded step is a transaction inside of that of the call which records it: ``nested`` is true then.
        """
        if self.entries is None or not nested:
            self.entries = []
        return len(self.entries)

    def since(self, mark: int) -> list[tuple[Tensor, Index, Tensor]]:
        """The entries behind the first ``mark``, the last one first."""
        return [] if self.entries is None else self.entries[mark:][::-1]

    @torch.no_grad()
    def undo(self, mark: int) -> None:
        """Write back what was there."""
        for tensor, index, old in self.since(mark):
            tensor[index] = old
        self.drop(mark)

    @torch.no_grad()
    def keep_where(self, condition: Tensor, mark: int) -> None:
        """Write back what was there unless ``condition``, a scalar, is true; nothing waits for the device."""
        for tensor, index, old in self.since(mark):
            tensor[index] = torch.where(condition, tensor[index], old)

    def drop(self, mark: int) -> None:
        """Forget the entries behind the first ``mark``."""
        if self.entries is not None:
            del self.entries[mark:]


class LoggedBuffers(nn.Module):
    """A module with buffers that may be too large to be copied before every step.

    Before a part of such a buffer is overwritten, :meth:`remember` notes what was there; before all of them are,
    :meth:`remember_all` does. Buffers of a megabyte or less are copied, which takes less time than the notes.

    Attributes:
        logged: Names of the buffers.
    """

    logged: ClassVar[tuple[str, ...]] = ()

    @property
    def is_large(self) -> bool:
        """Whether changes of the buffers are noted."""
        sizes: list[int] = [self.get_buffer(name).nbytes for name in self.logged]
        return sum(sizes) > LARGE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.undo_log = UndoLog()

    def remember(self, tensor: Tensor, *index: Tensor) -> Tensor:
        """Note what a logged buffer holds at an index, which is about to be overwritten.

        Args:
            tensor: The buffer.
            *index: One tensor of integers for each of the first dimensions, as for ``tensor[index]``.

        Returns:
            A copy of what the buffer holds there.
        """
        old = tensor[index]
        if self.undo_log.entries is not None and self.is_large:
            self.undo_log.entries.append((tensor, index, old))
        return old

    def remember_all(self) -> None:
        """Note what all logged buffers hold."""
        buffers = [self.get_buffer(name) for name in self.logged]
        if self.undo_log.entries is not None and self.is_large:
            self.undo_log.entries += [(buffer, ..., buffer.clone()) for buffer in buffers]

    def read_before(self, live: Tensor) -> Tensor:
        """A copy of what a logged buffer held before the transaction.

        A step may write to the buffer at the same time. It notes what was there before it writes, so the notes, which
        are read after the copy is made, cover everything that the copy may hold of the step.
        """
        saved = live.clone()
        for tensor, index, old in self.undo_log.since(0):
            if tensor is live:
                saved[index] = old
        return saved


class Transaction:
    """A module as it was before a call: the tensors that may change, and the attributes of its parts.

    At first only the tensors of the host are saved: counters, and the states of random generators. A recorded step,
    which a device runs as a whole, needs no more. :meth:`save` adds all the rest.

    Args:
        module: The module.
    """

    def __init__(self, module: Root) -> None:
        assert isinstance(module, nn.Module)
        self._parts = find_parts(module)
        self._layout = module.find_layout(self._parts)
        logs = [part for part in self._parts if isinstance(part, LoggedBuffers)]
        self._logs = [(log, log.undo_log.begin(module.lock.is_open())) for log in logs]
        self._on_host = [_SavedGroup(places) for places in self._layout.host]
        self._on_device: list[_SavedGroup] = []
        self._attributes: list[_SavedAttributes] = []
        self._view: dict[int, Any] | None = None
        self.reading = threading.RLock()

    def save(self) -> None:
        """Save everything that may change, once."""
        self.save_attributes()
        if not self._on_device:
            self._on_device = [_SavedGroup(places) for places in self._layout.device]

    def save_attributes(self) -> None:
        """Save the attributes of all parts, once."""
        if not self._attributes:
            self._attributes = [_SavedAttributes(part) for part in self._parts]

    @torch.no_grad()
    def keep_where(self, condition: Tensor) -> None:
        """Make the tensors what they were unless ``condition``, a scalar, is true; nothing waits for the device.

        The tensors of the host stay as they are.
        """
        for log, mark in self._logs:
            log.undo_log.keep_where(condition, mark)
        for group in self._on_device:
            keep_where(condition, group.find_tensors(), group.copies.tensors())

    def changed_tensors(self, device: torch.device) -> Iterator[Tensor]:
        """The tensors on a device that the step may have changed, as they are now; not those of large memories."""
        for group in self._on_device:
            if group.tensors[0].device == device:
                yield from group.find_tensors()

    def roll_back(self) -> None:
        """Make the module what it was. This may be interrupted, and done again."""
        with torch.inference_mode(False), torch.no_grad():
            for log, mark in self._logs:
                log.undo_log.undo(mark)
            for attributes in self._attributes:
                attributes.restore()
            for tensor, saved in self._pairs():
                tensor.copy_(saved)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The tensors that were saved, and their copies."""
        for group in self._on_host + self._on_device:
            yield from zip(group.tensors, group.copies.tensors(), strict=True)

    def drop_logs(self) -> None:
        """Forget what was noted of large buffers: the writes were recorded and have not happened."""
        for log, mark in self._logs:
            log.undo_log.drop(mark)

    def view(self, module: nn.Module) -> Any:
        """A copy of a module as it was before the call; it shares the tensors that do not change.

        The caller holds the gate of the lock, so that no other transaction begins meanwhile.

        Args:
            module: The module of this transaction, a part of it, or one that it is a part of, such as a policy.
        """
        if self._view is None:
            self.save()
            self._view = self._build_view()
        if id(module) not in self._view:
            around = [part for part in find_parts(module) if id(part) not in self._view]
            _copy_parts([_SavedAttributes(part) for part in around], self._view)
        return self._view[id(module)]

    def drop_view(self) -> None:
        """Forget the copy: a reader that was interrupted may have left it changed."""
        self._view = None

    def _build_view(self) -> dict[int, Any]:
        """A copy of each part, by its identity."""
        memo: dict[int, Any] = {id(tensor): _like(tensor, copied) for tensor, copied in self._pairs()}
        for log, _ in self._logs:
            if log.is_large:
                memo |= {id(t := log.get_buffer(name)): log.read_before(t) for name in log.logged}
        _copy_parts(self._attributes, memo)
        return memo


class _SavedGroup:
    """Tensors of one type and device, with copies of what they were."""

    def __init__(self, places: list[Place]) -> None:
        self._places, self.tensors = places, [place.table[place.key] for place in places]
        self.copies = Copies(self.tensors, by_runs=self.tensors[0].device.type != "cpu")

    def find_tensors(self) -> list[Tensor]:
        """The tensors that are in these places now."""
        return [place.table[place.key] for place in self._places]


class _SavedAttributes:
    """The attributes of a module, and what its tables contained."""

    def __init__(self, part: nn.Module) -> None:
        self.part, self.values = part, vars(part).copy()
        self._filled = {name: table.copy() for name in _TABLES if (table := self.values[name])}

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """What the tables contained, by their names."""
        return {name: self._filled.get(name) or type(self.values[name])() for name in _TABLES}

    def restore(self) -> None:
        """Set everything back."""
        _set_content(vars(self.part), self.values)
        for name, content in self.tables.items():
            _set_content(self.values[name], content)

    def find_tensors(self) -> Iterator[Tensor]:
        """Parameters, buffers and the initial state."""
        tables = (*map(self._filled.get, ("_parameters", "_buffers")), self.values.get("_initial"))
        yield from (tensor for table in tables if table for tensor in table.values() if tensor is not None)


def _copy_parts(parts: list[_SavedAttributes], memo: dict[int, Any]) -> None:
    """Copy modules as they were saved. Tensors that have no copy in ``memo`` are shared; ``memo`` gets the copies."""
    for saved in parts:
        for tensor in saved.find_tensors():
            memo.setdefault(id(tensor), tensor)
    memo |= {id(saved.part): object.__new__(type(saved.part)) for saved in parts}
    for saved in parts:
        own = saved.values | saved.tables
        own.pop("_compiled_call_impl", None)  # it would call the original
        for name, value in own.items():
            vars(memo[id(saved.part)])[name] = _copy_value(value, memo, hooks=name.endswith("_hooks"))


def find_parts(root: nn.Module) -> list[nn.Module]:
    """The module and everything inside of it; as ``modules()``, and several times as fast."""
    found, seen = [root], {root}
    for part in found:
        for child in part._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                found.append(child)
    return found


def _copy_value(value: Any, memo: dict[int, Any], hooks: bool) -> Any:
    """A copy of an attribute of a module. What cannot be copied, such as a lock, is shared; so are hooks."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hooks and isinstance(value, dict):
        shared = value.copy()
        shared.update({key: _rebind(hook, memo) for key, hook in value.items()})
        return shared
    size = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        for key in list(memo)[size:]:  # a copy that fails leaves parts of it behind
            del memo[key]
        return value


def _rebind(hook: Any, memo: dict[int, Any]) -> Any:
    """A method of a module that is copied becomes the same method of its copy."""
    owner = memo.get(id(getattr(hook, "__self__", None)))
    return hook if owner is None else MethodType(hook.__func__, owner)


def _set_content(target: dict[Any, Any], content: dict[Any, Any]) -> None:
    for key in target.keys() - content.keys():
        del target[key]
    target.update(content)


def _like(tensor: Tensor, saved: Tensor) -> Tensor:
    """A saved copy as what it is a copy of: a parameter or a buffer."""
    return nn.Parameter(saved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else saved


class StepLock(Renewed):
    """Decides who changes and who reads a module.

    Modules that change together, such as an adapter and its policy, share a lock. A copy of a module gets its own.

    ============= ================================================== ==========================================
    held          by a step                                          by a reader
    ============= ================================================== ==========================================
    ``_turn``     from its beginning to its end                      never
    ``_gate``     while it begins, and while it is undone            while it reads the module, or copies what
                                                                     the module was before the open step
    ``_entrance`` while it waits for the gate                        for a moment, so that a step that waits
                                                                     comes first
    ============= ================================================== ==========================================
    """

    def __init__(self) -> None:
        # Plain locks in `with` statements, and nothing else: an interrupt cannot leave one of them locked.
        self._turn, self._gate, self._entrance = (threading.RLock() for _ in range(3))
        self._open: Transaction | None = None
        self._stream: torch.cuda.Stream | None = None
        self.pickled: object = None

    def step(
        self,
        module: Root,
        begin: Callable[[Transaction, Callable[[], None]], R | None],
        finish: Callable[[Transaction], R],
    ) -> R:
        """Run a step as a transaction, when it is its turn.

        Args:
            module: The module that the step may change.
            begin: The part of the step that readers wait for. A recorded step does everything here, and calls the
                second argument, which ends the transaction, in the same moment as it is launched. Any other step
                returns None.
            finish: The rest of a step that is not recorded.

        Raises:
            RuntimeError: The step was called from inside of a step of the same module.
        """
        if self.is_stepping():
            raise RuntimeError(
                "an adapter was called from inside of its own step, for example by a hook; call it after the step"
            )
        modes = ThreadModes(module.device.type)
        with self._turn:
            self._recover()
            try:
                with self._entrance, self._gate:
                    self._follow_stream(module.device)
                    self._open = transaction = Transaction(module)
                    # No Python code: an interrupt comes before it or after it.
                    out = begin(transaction, partial(setattr, self, "_open", None))
                    if out is None:
                        transaction.save()
                if out is None:
                    out = finish(transaction)
                self._open = None
            except BaseException:
                modes.restore()
                self._recover()
                raise
            return out

    def change(self, module: Root, write: Callable[[], None]) -> None:
        """Change a module as a whole. Inside of a step, this is a part of the step."""
        if self.is_stepping():
            write()
            return

        def begin(transaction: Transaction, commit: Callable[[], None]) -> bool:
            transaction.save()
            write()
            return True

        self.step(module, begin, lambda _: True)

    def read(self, module: Root, function: Callable[[Any], R]) -> R:
        """Read a module between two changes, without waiting for the end of a step.

        Args:
            module: The module.
            function: Gets the module, or a copy of what it was before the step that is under way.
        """
        assert isinstance(module, nn.Module)
        if _is_owned(self._gate) and not self.is_stepping():  # a part of a larger read
            return function(module)
        modes = ThreadModes(module.device.type)
        try:
            with self._entrance:
                pass
            with self._gate:
                if self._open is None:
                    return self._read_itself(module, function)
                transaction = self._open
                before = transaction.view(module)
            with transaction.reading, self._beside_stream(module.device):
                try:
                    return function(before)
                except BaseException:
                    transaction.drop_view()
                    raise
        except BaseException:
            modes.restore()
            raise

    def _read_itself(self, module: Root, function: Callable[[Any], R]) -> R:
        """Read a module while no step is under way. A pass may set attributes, which an interrupt must not leave."""
        self._follow_stream(module.device)
        transaction = Transaction(module)
        transaction.save_attributes()
        try:
            self._open = transaction
            out = function(module)
            self._open = None
        except BaseException:
            self._recover()
            raise
        return out

    def is_open(self) -> bool:
        """Whether a transaction is open."""
        return self._open is not None

    def is_stepping(self) -> bool:
        """Whether this thread is inside of a step."""
        return _is_owned(self._turn)

    def _recover(self) -> None:
        """Undo a change that did not reach its end."""
        with self._gate:  # readers copy what the module was before, and this ends it
            if self._open is not None:
                self._open.roll_back()
                self._open = None

    def _follow_stream(self, device: torch.device) -> None:
        """Let the present CUDA stream wait for the one that used the tensors before."""
        if device.type == "cuda":
            current = torch.cuda.current_stream(device)
            if self._stream is not None and self._stream != current:
                current.wait_stream(self._stream)
            self._stream = current

    @contextmanager
    def _beside_stream(self, device: torch.device) -> Iterator[None]:
        """Read copies that were made on another CUDA stream, whose memory must not be used again before."""
        home = self._stream
        current = torch.cuda.current_stream(device) if home is not None else None
        if home is None or current is None or home == current:
            yield
            return
        current.wait_stream(home)
        try:
            yield
        finally:
            home.wait_stream(current)


def _is_owned(lock: Any) -> bool:
    """Whether this thread holds a lock."""
    owned: bool = lock._is_owned()
    return owned
