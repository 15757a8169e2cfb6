"""Plans on disk, with entries that hold no plan: what is trusted, kept, replaced and removed."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cudnn_mha import store as module
from cudnn_mha.checks import Kind, Reason
from cudnn_mha.devices import described
from cudnn_mha.store import (
    ABANDONED_AFTER,
    FORMAT,
    TOUCH_AFTER,
    BadFileError,
    Entry,
    PlanKey,
    Store,
    UntrustedError,
)
from tests.support import BACKWARD, attention

KEY = PlanKey(attention(BACKWARD), described("h200"), None, 92400, "1.32.0", ("",)).to_dict()
PLAN = Entry(KEY, "eng6_k24=2", 4096, None, bytes(range(256)))
REFUSAL = Entry(KEY, refusal=Reason("cudnn", "cuDNN: no engine for “this”", Kind.UNSUPPORTED))


def numbered(number: int, size: int = 100) -> Entry:
    """One of many entries of the same size."""
    key = {**KEY, "workspace_limit": 10**6 + number}
    return Entry(key, "eng", 0, None, bytes([number % 256]) * size)


def kept(store: Store, count: int) -> list[int]:
    """The numbers of the entries that are there."""
    return [n for n in range(count) if store.path(numbered(n).key).exists()]


def age(path: Path, seconds: float) -> float:
    """Makes the file look as if it was last used so long ago; that time."""
    then = time.time() - seconds
    os.utime(path, (then, then))
    return then


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "plans")


# ----------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("entry", [PLAN, REFUSAL, Entry(KEY, "eng", 0)])
def test_what_is_saved_is_loaded(store: Store, entry: Entry) -> None:
    assert store.load(KEY) is None
    assert store.save(entry)
    assert store.load(KEY) == entry
    assert Store(store.folder).load(KEY) == entry
    assert Store(store.folder, read_only=True).load(KEY) == entry
    (found,) = store.inspect()
    assert found.entry == entry
    assert found.problem is None
    assert (found.path, found.size) == (store.path(KEY), len(entry.to_bytes()))
    assert abs(found.used - time.time()) < 60


def test_a_blob_may_hold_any_byte(store: Store) -> None:
    for blob in (b"", b"\n", b"\n\n{}", b"cudnn_mha plan\n", os.urandom(10_000)):
        store.save(Entry(KEY, "eng", 1, None, blob))
        assert store.load(KEY) == Entry(KEY, "eng", 1, None, blob)


def test_the_last_writer_wins(store: Store) -> None:
    store.save(REFUSAL)
    store.save(PLAN)
    assert store.load(KEY) == PLAN
    assert len(store.files()) == 1


def test_an_entry_says_what_it_is_for() -> None:
    assert PLAN.spec == attention(BACKWARD)
    assert PLAN.gpu == "NVIDIA H200"


def test_files_and_folders_are_the_user_s_alone(store: Store) -> None:
    old = os.umask(0)
    try:
        store.save(PLAN)
    finally:
        os.umask(old)
    path = store.path(KEY)
    modes = [oct(each.stat().st_mode & 0o777) for each in (path, path.parent, store.folder)]
    assert modes == ["0o600", "0o700", "0o700"]


def test_a_read_only_store_changes_nothing(store: Store) -> None:
    store.save(PLAN)
    path = store.path(KEY)
    then = age(path, 10 * TOUCH_AFTER)
    reader = Store(store.folder, read_only=True)
    assert reader.load(KEY) == PLAN
    assert path.stat().st_mtime == pytest.approx(then)
    assert reader.save(REFUSAL) is False
    reader.discard(KEY, "no reason")
    path.write_bytes(b"garbage")
    assert reader.load(KEY) is None
    assert path.read_bytes() == b"garbage"


# ------------------------------------------------------------------------------------ corruption


def test_every_single_bit_counts() -> None:
    content = PLAN.to_bytes()
    for position in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[position] ^= 1 << bit
            with pytest.raises(BadFileError):
                Entry.from_bytes(bytes(flipped))


def resealed(entry: Entry, change: Callable[[Any], Any]) -> bytes:
    """The file of an entry with its header changed and its checksum right."""
    _, body = entry.to_bytes()[len(module._MAGIC) :].split(b"\n", 1)
    line, blob = body.split(b"\n", 1)
    header = change(json.loads(line))
    line = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = line + b"\n" + blob
    return module._MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def with_key(**fields: Any) -> Callable[[Any], Any]:
    return lambda header: {**header, "key": {**header["key"], **fields}}


CONTENT = PLAN.to_bytes()
BAD = {
    "empty": b"",
    "truncated in the magic": CONTENT[:5],
    "truncated in the checksum": CONTENT[:40],
    "truncated in the header": CONTENT[:200],
    "truncated by one byte": CONTENT[:-1],
    "one byte more": CONTENT + b"\0",
    "a flipped bit": CONTENT[:-7] + bytes([CONTENT[-7] ^ 4]) + CONTENT[-6:],
    "foreign": b"\x7fELF" + os.urandom(2000),
    "only zeros": bytes(len(CONTENT)),
    "another format": resealed(PLAN, with_key(format=FORMAT - 1)),
    "a later format": resealed(PLAN, with_key(format=FORMAT + 1)),
    "another key": numbered(3).to_bytes(),
    "no JSON": resealed(PLAN, lambda header: b"{"),
    "no text": resealed(PLAN, lambda header: b"\xff\xfe"),
    "no object": resealed(PLAN, lambda header: [1, 2]),
    "nested too deeply": resealed(PLAN, lambda header: b"[" * 100_000),
    "no key": resealed(PLAN, lambda header: {**header, "key": None}),
    "no refusal": resealed(PLAN, lambda header: {"key": header["key"]}),
    "a refusal of no kind": resealed(
        PLAN, lambda header: {**header, "refusal": {"rule": "a", "message": "b", "kind": "c"}}
    ),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_what_is_no_sound_entry_is_ignored_and_replaced(
    store: Store, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    store.save(PLAN)
    path = store.path(KEY)
    path.write_bytes(content)
    (found,) = store.inspect()
    assert found.entry is None
    assert found.problem
    with caplog.at_level(logging.INFO, "cudnn_mha"):
        assert store.load(KEY) is None
    assert not path.exists()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith(f"the stored plan {path} is ignored: it")
    assert store.save(PLAN)
    assert store.load(KEY) == PLAN


def test_the_reason_is_told(store: Store) -> None:
    words = {
        "foreign": "it is no plan of cudnn_mha",
        "truncated by one byte": "its checksum does not match: it is truncated or corrupted",
        "another format": f"it has format {FORMAT - 1}, this version reads {FORMAT}",
        "another key": "its name is not that of its key",
    }
    store.save(PLAN)
    for name, text in words.items():
        store.path(KEY).write_bytes(BAD[name])
        assert [found.problem for found in store.inspect()] == [text]


@pytest.mark.parametrize(
    "key",
    [
        {"format": FORMAT},
        {**KEY, "spec": {"direction": "sideways"}},
        {**KEY, "spec": 5},
        {**KEY, "gpu": None},
        {**KEY, "gpu": {"sm": 90}},
    ],
)
def test_a_sound_file_with_a_key_of_no_call_is_a_problem(store: Store, key: Any) -> None:
    entry = Entry(key, "eng", 0)
    store.save(entry)
    (found,) = store.inspect()
    assert found.entry is None
    assert str(found.problem).startswith("its key is not understood")


def test_a_folder_in_the_place_of_a_file_is_ignored(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.path(KEY).mkdir(parents=True)
    assert store.load(KEY) is None
    assert store.save(PLAN) is False
    assert "plans are not kept in" in caplog.text


def test_discarded_entries_are_gone(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.save(PLAN)
    with caplog.at_level(logging.INFO, "cudnn_mha"):
        store.discard(KEY, "cuDNN cannot load it")
        store.discard(KEY, "cuDNN cannot load it")
    assert store.files() == []
    assert "is ignored: cuDNN cannot load it" in caplog.text


# ----------------------------------------------------------------------------------------- trust


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the path belong to another user: really so for root, else by changing who we are."""
    if os.getuid() == 0:
        os.chown(path, 12345, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)


def parts(store: Store) -> dict[str, Path]:
    path = store.path(KEY)
    return {"file": path, "subfolder": path.parent, "folder": store.folder}


@pytest.mark.parametrize("part", ["file", "subfolder", "folder"])
def test_what_belongs_to_another_user_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    store.save(PLAN)
    give_away(parts(store)[part], monkeypatch)
    (found,) = store.inspect()
    assert "belongs to user" in str(found.problem)
    assert [store.load(KEY), store.load(KEY)] == [None, None]
    (record,) = caplog.records  # one warning, however often
    assert record.levelno == logging.WARNING
    assert "stored plans are ignored" in record.getMessage()
    assert "belongs to user" in record.getMessage()
    assert "use a folder of your own" in record.getMessage()
    assert store.path(KEY).exists()  # it is not ours to remove


@pytest.mark.parametrize("mode", [0o020, 0o002])
@pytest.mark.parametrize("part", ["file", "subfolder", "folder"])
def test_what_others_can_write_is_refused(
    store: Store, caplog: pytest.LogCaptureFixture, part: str, mode: int
) -> None:
    store.save(PLAN)
    path = parts(store)[part]
    path.chmod(path.stat().st_mode | mode)
    assert store.load(KEY) is None
    (record,) = caplog.records
    assert record.getMessage() == (
        f"stored plans are ignored: {path} can be written by other users, and a plan is native "
        f"code; `chmod -R go-w {path}`"
    )
    path.chmod(path.stat().st_mode & ~mode)
    assert store.load(KEY) == PLAN


def test_nothing_is_written_where_others_can_write(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.folder.mkdir()
    store.folder.chmod(0o777)
    assert store.load(KEY) is None
    assert [store.save(PLAN), store.save(PLAN)] == [False, False]
    assert list(store.folder.iterdir()) == []
    (record,) = caplog.records
    assert record.getMessage().startswith(f"plans are not kept in {store}: {store} can be written")
    with pytest.raises(UntrustedError, match="chmod -R go-w"):
        store.write(PLAN)
    with pytest.raises(PermissionError, match="chmod -R go-w"):
        store.make()


def test_a_folder_of_no_use_says_why(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.problem() is None  # not there yet
    store.save(PLAN)
    assert store.problem() is None
    store.folder.chmod(0o775)
    assert store.problem() == (
        f"{store} can be written by other users, and a plan is native code; `chmod -R go-w {store}`"
    )
    store.folder.chmod(0o755)
    assert store.problem() is None
    (tmp_path / "file").touch()
    assert Store(tmp_path / "file").problem() == f"{tmp_path / 'file'} is no folder"
    inside = Store(tmp_path / "file" / "plans")
    assert inside.problem() == f"{inside} cannot be read (Not a directory)"
    assert inside.files() == []
    give_away(store.folder, monkeypatch)
    assert str(store.problem()).startswith(f"{store} belongs to user ")


@pytest.mark.parametrize("mode", [0o000, 0o300, 0o600])
def test_a_folder_that_cannot_be_read_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    store.save(PLAN)
    store.folder.chmod(mode)
    # As anybody but root has it.
    monkeypatch.setattr(os, "access", lambda path, wanted: Path(path).stat().st_mode >> 6 & wanted
                        == wanted)  # fmt: skip
    assert store.problem() == f"{store} cannot be read by this user"
    store.folder.chmod(0o500)
    assert store.problem() is None


def test_what_root_owns_is_trusted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save(PLAN)
    facts = os.stat_result((0o100600, 0, 0, 1, 0, 0, 0, 0, 0, 0))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    module._require_own(store.path(KEY), facts)
    with pytest.raises(UntrustedError, match="belongs to user 1001"):
        module._require_own(Path("plan"), os.stat_result((0o100600, 0, 0, 1, 1001, *[0] * 5)))


# ----------------------------------------------------------------------- disks that take no more


def refuse_to_write(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    class Full:
        def __init__(self, handle: int, mode: str) -> None:
            self.handle = handle

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            os.close(self.handle)

        def write(self, content: bytes) -> None:
            raise error

    monkeypatch.setattr(os, "fdopen", Full)


def refuse_to_make(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def mkstemp(**_: Any) -> Any:
        raise error

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)


def refuse_folders(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    def mkdir(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Path, "mkdir", mkdir)


@pytest.mark.parametrize(
    ("refuse", "code"),
    [
        (refuse_to_write, errno.ENOSPC),
        (refuse_to_write, errno.EDQUOT),
        (refuse_to_make, errno.EROFS),
        (refuse_folders, errno.EACCES),
    ],
)
def test_a_disk_that_takes_no_more_costs_one_warning(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    refuse: Callable[[pytest.MonkeyPatch, OSError], None],
    code: int,
) -> None:
    with monkeypatch.context() as patch:
        refuse(patch, OSError(code, os.strerror(code)))
        assert [store.save(PLAN), store.save(REFUSAL)] == [False, False]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == f"plans are not kept in {store}: [Errno {code}] " + os.strerror(
        code
    )
    assert [path for path in store.folder.rglob("*") if path.is_file()] == []
    assert store.save(PLAN)  # once there is room again
    assert store.load(KEY) == PLAN


# -------------------------------------------------------------------------------------- eviction

SIZE = len(numbered(0).to_bytes())


def test_least_recently_used_files_go_first(tmp_path: Path) -> None:
    store = Store(tmp_path / "plans", 4 * SIZE)
    for number in range(4):
        store.save(numbered(number))
        age(store.path(numbered(number).key), 10_000 - number)
    assert store.load(numbered(0).key) == numbered(0)  # a use, so 1 is now the oldest
    store.save(numbered(4))
    assert kept(store, 6) == [0, 2, 3, 4]
    store.save(numbered(5))
    assert kept(store, 6) == [0, 3, 4, 5]


def test_a_use_is_written_down_now_and_then(store: Store) -> None:
    store.save(PLAN)
    path = store.path(KEY)
    for seconds, touched in ((TOUCH_AFTER - 60, False), (TOUCH_AFTER + 60, True)):
        then = age(path, seconds)
        store.load(KEY)
        assert (path.stat().st_mtime > then + 1) is touched


def test_the_folder_stays_within_its_bound(tmp_path: Path) -> None:
    limit = 64 * SIZE
    store = Store(tmp_path / "plans", limit)
    for number in range(300):
        store.save(numbered(number))
        total = sum(facts.st_size for _, facts in store.files())
        assert total <= limit + limit // 32 + SIZE
    assert total > limit // 2


def test_what_other_processes_left_counts_too(tmp_path: Path) -> None:
    unbounded = Store(tmp_path / "plans")
    for number in range(20):
        unbounded.save(numbered(number))
        age(unbounded.path(numbered(number).key), 10_000 - number)
    assert kept(unbounded, 20) == list(range(20))
    Store(tmp_path / "plans", 5 * SIZE).save(numbered(20))
    assert kept(unbounded, 21) == [16, 17, 18, 19, 20]


def test_a_bound_of_nothing_keeps_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "plans", 0)
    assert store.save(PLAN)
    assert store.files() == []


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path / "plans", 10 * SIZE)
    store.save(numbered(0))
    folder = store.path(numbered(0).key).parent
    old, young = folder / ".abc.part", folder / ".def.part"
    for part in (old, young):
        part.write_bytes(b"half a pl")
    age(old, ABANDONED_AFTER + 60)
    assert len(store.files()) == 1
    Store(store.folder, 10 * SIZE).save(numbered(1))
    assert (old.exists(), young.exists()) == (False, True)
    store.clear()
    assert not young.exists()


def test_clearing_tells_how_much_it_was(store: Store) -> None:
    assert store.clear() == (0, 0)
    for number in range(5):
        store.save(numbered(number))
    foreign = store.folder / "notes.txt"
    foreign.write_text("mine")
    assert store.clear() == (5, 5 * SIZE)
    assert store.files() == []
    assert foreign.read_text() == "mine"


def test_files_come_in_the_order_of_their_use(store: Store) -> None:
    order = random.Random(1).sample(range(8), 8)
    for number in range(8):
        store.save(numbered(number))
        age(store.path(numbered(number).key), 1000 * order[number])
    names = [found.entry for found in store.inspect()]
    assert names == [numbered(order.index(place)) for place in range(7, -1, -1)]


# ------------------------------------------------------------------------------- many processes

USER = """
import json, random, sys
from pathlib import Path
from cudnn_mha.store import FORMAT, Entry, Store

seed, folder, count = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
assert "torch" not in sys.modules
draw = random.Random(seed)
store = Store(folder, 20_000)
loaded = saved = 0
for _ in range(count):
    number = draw.randrange(24)
    key = {"format": FORMAT, "number": number}
    entry = Entry(key, f"eng{number}", number, None, bytes([number]) * (500 + 40 * number))
    found = store.load(key)
    if found is None:
        saved += store.save(entry)
    elif found != entry:
        sys.exit(f"wrong entry {found}")
    else:
        loaded += 1
    if draw.random() < 0.02:
        store.discard(key, "as it pleases")
print(json.dumps([loaded, saved]))
"""

VANDAL = """
import contextlib, os, random, shutil, sys, time
from pathlib import Path

folder, draw = Path(sys.argv[1]), random.Random(5)
print("ready", flush=True)
while True:
    with contextlib.suppress(OSError):
        files = list(folder.glob("??/*.plan"))
        if not files:
            continue
        path = draw.choice(files)
        act = draw.randrange(5)
        if act == 0:
            path.unlink()
        elif act == 1:
            os.truncate(path, draw.randrange(200))
        elif act == 2:
            path.write_bytes(os.urandom(300))
        elif act == 3:
            os.replace(path, draw.choice(files))
        elif draw.random() < 0.1:
            shutil.rmtree(path.parent)
    time.sleep(0.001)
"""


def test_many_processes_share_a_folder_that_is_vandalized(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    vandal = subprocess.Popen(
        [sys.executable, "-c", VANDAL, folder], stdout=subprocess.PIPE, text=True
    )
    try:
        users = [
            subprocess.Popen(
                [sys.executable, "-c", USER, str(seed), folder, "100"],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for seed in range(64)
        ]
        loaded = saved = 0
        for user in users:
            out, err = user.communicate(timeout=120)
            assert user.returncode == 0, err
            assert "Traceback" not in err
            counts = json.loads(out)
            loaded, saved = loaded + counts[0], saved + counts[1]
        assert vandal.poll() is None
    finally:
        vandal.kill()
        vandal.communicate()
    assert loaded > 500  # so it was used,
    assert saved > 200  # and so was it destroyed
    assert list(folder.glob("??/.*.part")) == []
