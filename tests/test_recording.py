"""Which calls a program makes, written down and read back."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cudnn_mha import config, explain, recording
from cudnn_mha.cache import plans
from cudnn_mha.config import RECORD
from cudnn_mha.recording import Recorder, read, record
from cudnn_mha.spec import AttentionSpec
from tests.support import BACKWARD, BSHD, attention, tensor, with_bias

PLAIN = attention()
SPECS = [
    PLAIN,
    attention(BACKWARD, causal=True, deterministic=True, order=BSHD),
    attention(heads=(8, 2, 4), lengths=(1, 777), dims=(128, 64), dtype="bfloat16", lse=True),
    attention(scale=1 / 3, dropout_p=0.1, bias=with_bias(PLAIN, (1, 4, 1, 128), "float32")),
    attention(BACKWARD, bias=tensor((2, 1, 128, 128)), grad_bias=tensor((2, 1, 128, 128))),
]


@pytest.fixture(autouse=True)
def nothing_else_is_recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(recording, "_recorders", [])
    monkeypatch.setattr(recording, "_of_environment", {})
    monkeypatch.delenv(RECORD, raising=False)
    config.reload()
    yield
    monkeypatch.undo()
    config.reload()


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def own_file(folder: Path) -> Path:
    return folder / f"{socket.gethostname()}-{os.getpid()}.jsonl"


# --------------------------------------------------------------------------------------- writing


def test_what_is_noted_is_read_back(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "calls.jsonl")
    for spec in SPECS:
        recorder.note(spec)
    assert read([tmp_path / "calls.jsonl"]) == SPECS
    assert [json.loads(line) for line in lines(recorder.path)] == [s.to_dict() for s in SPECS]


def test_only_distinct_specs_are_written_and_no_remedy(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "calls.jsonl")
    padded = dataclasses.replace(SPECS[1], padding=True)
    for spec in (*SPECS, padded, *SPECS):
        recorder.note(spec)
    assert read([recorder.path]) == SPECS
    assert len(lines(recorder.path)) == len(SPECS)
    assert "padding" not in recorder.path.read_text()


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "new" / "folder" / "calls.jsonl")
    for count, spec in enumerate(SPECS, 1):
        recorder.note(spec)
        assert read([recorder.path]) == SPECS[:count]


def test_a_recording_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    Recorder(path).note(SPECS[0])
    Recorder(path).note(SPECS[1])
    Recorder(path).note(SPECS[0])
    assert len(lines(path)) == 3
    assert read([path]) == SPECS[:2]


@pytest.mark.parametrize("there", [True, False])
def test_in_a_folder_each_process_has_a_file(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "calls"
    if there:
        folder.mkdir()
    Recorder(folder if there else f"{folder}/").note(PLAIN)
    assert list(folder.iterdir()) == [own_file(folder)]
    assert read([folder]) == [PLAIN]


def test_the_user_s_folder_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Recorder("~/calls.jsonl").note(PLAIN)
    assert read(["~/calls.jsonl"]) == read([tmp_path / "calls.jsonl"]) == [PLAIN]


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC])
def test_a_disk_that_takes_no_more_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code))

    recorder = Recorder(tmp_path / "calls.jsonl")
    monkeypatch.setattr("builtins.open", refuse)
    for spec in SPECS:
        recorder.note(spec)
    monkeypatch.undo()
    (logged,) = caplog.records
    assert logged.levelno == logging.WARNING
    path = tmp_path / "calls.jsonl"
    assert logged.getMessage() == (
        f"calls are not recorded in {path}: [Errno {code}] {os.strerror(code)}"
    )
    assert not path.exists()


def test_a_path_below_a_file_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    recorder = Recorder(tmp_path / "file" / "calls.jsonl")
    for spec in SPECS:
        recorder.note(spec)
    assert len(caplog.records) == 1


# ---------------------------------------------------------------------------- calls are recorded


def ask(length: int, **options: Any) -> None:
    """A call, as far as a machine without a GPU makes it."""
    shape = (2, 4, length, 64)
    assert explain(shape, shape, shape, gpu="h200", **options).served


def described(spec: AttentionSpec) -> tuple[str, int, bool]:
    return spec.direction.value, spec.seq_q, spec.lse


FORWARD_AND_BACKWARD = [("forward", 200, True), ("backward", 200, False)]


def test_calls_are_recorded_while_the_block_runs(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    ask(136)
    with record(path):
        ask(200, requires_grad=True)
        ask(200, requires_grad=True)
        ask(136)
    ask(264)
    assert [described(spec) for spec in read([path])] == [
        *FORWARD_AND_BACKWARD,
        ("forward", 136, False),
    ]
    assert not any(spec.padding for spec in read([path]))  # the backward's remedy on sm_90


def test_calls_that_were_decided_before_are_seen(tmp_path: Path) -> None:
    """Callers that kept their plans are made to look them up again."""
    heard: list[str] = []
    plans.on_drop(lambda: heard.append("dropped"))
    with record(tmp_path / "calls.jsonl"):
        assert heard == ["dropped"]
    assert heard == ["dropped"]
    plans._listeners.pop()


NOTHING = "no call was recorded, and {} was not written: no call reached cuDNN. Either the tensors"


@pytest.mark.parametrize("place", ["calls.jsonl", "calls/"])
def test_a_block_without_a_call_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    with record(f"{tmp_path}/{place}"):
        pass
    (logged,) = caplog.records
    assert (logged.name, logged.levelno) == ("cudnn_mha", logging.WARNING)
    path = own_file(tmp_path / "calls") if place.endswith("/") else tmp_path / place
    assert logged.getMessage().startswith(NOTHING.format(path))
    assert "on no CUDA GPU" in logged.getMessage()
    assert "no call goes through cudnn_mha" in logged.getMessage()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["calls.jsonl", "calls/"])
def test_a_block_is_not_told_of_calls_that_there_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    with record(f"{tmp_path}/{place}"):
        ask(136)
    by_another = tmp_path / place / "other-1.jsonl" if place.endswith("/") else tmp_path / place
    with record(f"{tmp_path}/{place}"):
        by_another.write_text(line() + "\n")
    assert caplog.messages == []
    os.utime(by_another, (0, 0))  # of a run before
    if place.endswith("/"):
        os.utime(own_file(tmp_path / "calls"), (0, 0))
    with record(f"{tmp_path}/{place}"):
        pass
    assert len(caplog.messages) == 1


IDLE = "import torch"
IMPORTED = "from cudnn_mha import cudnn_sdpa"
ON_THE_CPU = f"""{IMPORTED}
import torch
q = torch.ones(1, 1, 8, 8)
cudnn_sdpa(q, q, q)"""
RECORDED = """from cudnn_mha import explain
assert explain((1, 1, 8, 8), (1, 1, 8, 8), (1, 1, 8, 8), gpu="h200").served"""
FORKED = f"{IMPORTED}\nimport os\nif not os.fork(): raise SystemExit\nos.wait()"
SPAWNED = """import multiprocessing, torch
if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=print).start()"""


@pytest.mark.parametrize(
    ("script", "told"),
    [(IDLE, 1), (IMPORTED, 1), (ON_THE_CPU, 1), (RECORDED, 0), (FORKED, 1), (SPAWNED, 1)],
    ids=["idle", "imported", "cpu", "recorded", "forked", "spawned"],
)
def test_a_process_that_recorded_nothing_says_so_once(
    tmp_path: Path, script: str, told: int
) -> None:
    path = tmp_path / "calls.jsonl"
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py"],
        env=os.environ | {RECORD: str(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr.count("no call was recorded") == told
    assert done.stderr.startswith(NOTHING.format(path) if told else "")
    assert path.exists() == (not told)


def test_commands_make_no_calls_and_say_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cudnn_mha", "doctor"],
        env=os.environ | {RECORD: str(tmp_path / "calls.jsonl")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""


def test_blocks_may_be_nested_and_end_with_an_exception(tmp_path: Path) -> None:
    outer, inner = tmp_path / "outer.jsonl", tmp_path / "inner.jsonl"
    with record(outer):
        with pytest.raises(KeyError), record(inner):
            ask(136)
            raise KeyError
        ask(200)
    assert [spec.seq_q for spec in read([outer])] == [136, 200]
    assert [spec.seq_q for spec in read([inner])] == [136]


def test_the_environment_records_the_whole_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "calls.jsonl"
    monkeypatch.setenv(RECORD, str(path))
    config.reload()
    with record(tmp_path / "block.jsonl"):
        ask(200, requires_grad=True)
    ask(136)
    assert [described(s) for s in read([path])] == [*FORWARD_AND_BACKWARD, ("forward", 136, False)]
    assert [described(s) for s in read([tmp_path / "block.jsonl"])] == FORWARD_AND_BACKWARD


# ------------------------------------------------------------------------------- many processes

WRITER = """
import sys
from cudnn_mha.recording import Recorder
from tests.support import attention

recorder = Recorder(sys.argv[1])
first = int(sys.argv[2])
for number in range(first, first + 200):
    recorder.note(attention(lengths=(8 * number, 64)))
"""


@pytest.mark.parametrize("shared", [True, False])
def test_processes_that_write_at_once_do_not_mix_their_lines(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "calls.jsonl" if shared else tmp_path / "calls"
    path.touch() if shared else path.mkdir()
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, str(first)])
        for first in (1, 101, 201)
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0, 0]
    found = read([path])
    assert {spec.seq_q for spec in found} == {8 * number for number in range(1, 401)}
    assert len(found) == 400
    if shared:
        assert len(lines(path)) == 600
    else:
        assert [len(lines(file)) for file in path.iterdir()] == [200] * 3


FORK = """
import os, sys
from cudnn_mha import recording
from tests.support import attention

with recording.record(sys.argv[1]):
    recording.note(attention(lengths=(8, 8)))
    child = os.fork()
    recording.note(attention(lengths=(8, 8)))
    recording.note(attention(lengths=(16, 16) if child else (24, 24)))
    if not child:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(os.getpid(), child)
"""


@pytest.mark.parametrize("variable", [True, False])
def test_a_forked_process_writes_a_file_of_its_own(tmp_path: Path, variable: bool) -> None:
    block, whole = tmp_path / "block", tmp_path / "whole"
    block.mkdir()
    whole.mkdir()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, block],
        env=os.environ | ({RECORD: str(whole)} if variable else {}),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    parent, child = done.stdout.split()
    for folder in (block, whole) if variable else (block,):
        found = {
            file.stem.rpartition("-")[2]: [spec.seq_q for spec in read([file])]
            for file in folder.iterdir()
        }
        assert found == {parent: [8, 16], child: [8, 24]}


# --------------------------------------------------------------------------------------- reading


def test_recordings_are_read_in_order_and_each_spec_once(tmp_path: Path) -> None:
    one, folder = tmp_path / "one.jsonl", tmp_path / "more"
    folder.mkdir()
    for path, specs in ((one, SPECS[2:4]), (folder / "b.jsonl", SPECS[:3])):
        path.write_text("".join(json.dumps(spec.to_dict()) + "\n" for spec in specs))
    (folder / "a.jsonl").write_text("\n  \n" + json.dumps(SPECS[4].to_dict()))
    (folder / "notes.txt").write_text("not a recording")
    assert read([one, folder]) == [SPECS[2], SPECS[3], SPECS[4], SPECS[0], SPECS[1]]
    assert read([str(one)]) == SPECS[2:4]
    assert read([]) == []


def line(**fields: Any) -> str:
    return json.dumps(PLAIN.to_dict() | fields)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (b"{", "Expecting property name"),
        (b"[1, 2]", "it is no object"),
        (b"5", "it is no object"),
        (b"\xff\xfe", "codec can't decode"),
        (b"{}", "this is no attention spec (KeyError('direction'))"),
        (b'{"direction": "forward"}', "this is no attention spec (TypeError("),
        (line(direction="sideways").encode(), "this is no attention spec (ValueError("),
        (line(colour="red").encode(), "this is no attention spec (TypeError("),
        (line(query=5).encode(), "query must have a shape and a stride of 4 numbers, got 5"),
        (line(bias=[1]).encode(), "this is no attention spec (TypeError("),
        (line(bias=1).encode(), "bias must have a shape and a stride of 4 numbers, got 1"),
        (line(direction="backward").encode(), "grad_output must have a shape and a stride of 4"),
        (
            line(key={"shape": [2, 3], "stride": [3, 1], "dtype": "float16"}).encode(),
            "key must have a shape and a stride of 4 numbers, got TensorSpec(",
        ),
        (line(page_table=7).encode(), "page_table must have a shape and a stride of 4 numbers"),
        (line(scale="wide").encode(), "could not convert string to float: 'wide'"),
    ],
)
def test_what_is_no_recording_is_named_with_its_line(
    tmp_path: Path, bad: bytes, message: str
) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_bytes(line().encode() + b"\n\n" + bad + b"\n")
    with pytest.raises(ValueError) as caught:
        read([path])
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert message in str(caught.value)


def test_a_missing_recording_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl"):
        read([tmp_path / "nothing.jsonl"])


def test_whole_numbers_written_by_hand_are_the_same_graph(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_text(line(scale=1, dropout_p=0, softcap=2))
    (spec,) = read([path])
    wanted = dataclasses.replace(PLAIN, scale=1.0, softcap=2.0)
    assert spec == wanted
    assert json.dumps(spec.to_dict()) == json.dumps(wanted.to_dict())
