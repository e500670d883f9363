"""The run directory: one owner at a time, nothing overwritten by mistake, resumable after a kill."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fimaq.artifact.run_directory import RunDirectory
from fimaq.errors import FimaqError, InputError

CONFIG = {"settings": {"bits": "w4a4", "seed": 0, "model_args": {"depth": 2}}, "versions": {"torch": "1"}}
OTHER = {"settings": {"bits": "w3a3", "model_args": {"depth": 3}, "rank": 5}, "versions": {"torch": "1"}}

HOLDER = """
import os, sys, time
from pathlib import Path
from fimaq.artifact.run_directory import RunDirectory
run = RunDirectory.create(Path(sys.argv[1]), {"settings": {}}, resume=True)
worker = os.fork() if sys.argv[2] == "fork" else 0
if worker or sys.argv[2] != "fork":
    print(worker, flush=True)
time.sleep(60)
"""


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def start_unfinished(path: Path) -> None:
    with RunDirectory.create(path, CONFIG, resume=False) as run:
        run.event("started")
        run.save_stage("unit-000", {"w": torch.arange(3)}, {"loss": 0.5})


def start_finished(path: Path) -> None:
    start_unfinished(path)
    with RunDirectory.create(path, CONFIG, resume=True) as run:
        run.finish({"w": torch.arange(4)}, {"bits": 4}, {"top1": 80.0})


@contextmanager
def holding_process(path: Path, mode: str = "plain") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that holds the run directory, and the pid of its forked worker (0 without)."""
    command = [sys.executable, "-c", HOLDER, str(path), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        try:
            yield process, worker
        finally:
            process.kill()
            if worker:
                os.kill(worker, signal.SIGKILL)


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        yield


class TestStarting:
    def test_fresh_run_writes_its_config(self, tmp_path):
        path = tmp_path / "runs" / "deit"
        with RunDirectory.create(path, CONFIG, resume=False) as run:
            assert not run.complete
            stored = json.loads((path / "config.json").read_text())
            assert stored.pop("digest").startswith("sha256:")
            assert run.config == stored == CONFIG

    def test_resume_where_nothing_is_starts_fresh(self, tmp_path):
        with RunDirectory.create(tmp_path / "run", CONFIG, resume=True) as run:
            assert run.load_stage("unit-000") is None
            assert not run.complete

    def test_an_empty_folder_is_accepted(self, tmp_path):
        RunDirectory.check(tmp_path, resume=False)
        assert not list(tmp_path.iterdir())
        RunDirectory.create(tmp_path, CONFIG, resume=False).close()
        assert (tmp_path / "config.json").is_file()
        RunDirectory.check(tmp_path, resume=True)
        RunDirectory.check(tmp_path / "absent", resume=False)

    def test_what_a_start_killed_at_once_leaves_is_accepted(self, tmp_path):
        (tmp_path / ".lock").write_text("12345\n")
        (tmp_path / ".config.json.0a1b2c3d.partial").write_text('{"set')
        RunDirectory.create(tmp_path, CONFIG, resume=False).close()
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [".lock", "config.json"]

    def test_an_existing_file_is_refused(self, tmp_path):
        (tmp_path / "file").write_text("mine")
        for path in (tmp_path / "file", tmp_path / "file" / "run"):
            with pytest.raises(InputError, match="cannot be used as run directory"):
                RunDirectory.create(path, CONFIG, resume=False)
        assert snapshot(tmp_path) == {"file": b"mine"}

    def test_an_unwritable_parent_is_refused(self, tmp_path, monkeypatch):
        # Simulated: the superuser, as whom tests often run, may write anywhere.
        def denied(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(os, "mkdir", denied)
        with pytest.raises(InputError, match="Permission denied"):
            RunDirectory.create(tmp_path / "run", CONFIG, resume=False)

    @pytest.mark.parametrize("resume", [False, True])
    @pytest.mark.parametrize("name", ["thesis.txt", "model.safetensors", ".lock2"])
    def test_a_folder_of_someone_else_is_left_untouched(self, tmp_path, name, resume):
        (tmp_path / name).write_text("mine")
        with pytest.raises(InputError, match=rf"not a run directory \(it holds {name}\)"):
            RunDirectory.create(tmp_path, CONFIG, resume=resume)
        assert snapshot(tmp_path) == {name: b"mine"}

    def test_a_foreign_lock_file_is_left_untouched(self, tmp_path):
        (tmp_path / "thesis.txt").write_text("mine")
        (tmp_path / ".lock").write_text("not yours")
        with pytest.raises(InputError, match="not a run directory"):
            RunDirectory.create(tmp_path, CONFIG, resume=False)
        assert snapshot(tmp_path) == {"thesis.txt": b"mine", ".lock": b"not yours"}

    def test_a_start_that_fails_leaves_nothing_behind(self, tmp_path, monkeypatch):
        with full_disk(monkeypatch), pytest.raises(FimaqError, match=r"config\.json could not be written"):
            RunDirectory.create(tmp_path / "runs" / "deit", CONFIG, resume=False)
        assert list(tmp_path.iterdir()) == []
        RunDirectory.create(tmp_path / "runs" / "deit", CONFIG, resume=False).close()

    def test_a_start_that_fails_empties_a_folder_that_was_there(self, tmp_path, monkeypatch):
        with full_disk(monkeypatch), pytest.raises(FimaqError):
            RunDirectory.create(tmp_path, CONFIG, resume=False)
        assert list(tmp_path.iterdir()) == []


class TestResuming:
    def test_without_resume_an_unfinished_run_is_left_untouched(self, tmp_path):
        start_unfinished(tmp_path)
        before = snapshot(tmp_path)
        with pytest.raises(InputError, match="--resume continues it"):
            RunDirectory.create(tmp_path, CONFIG, resume=False)
        assert snapshot(tmp_path) == before

    def test_finished_stages_come_back(self, tmp_path):
        start_unfinished(tmp_path)
        with RunDirectory.create(tmp_path, CONFIG, resume=True) as run:
            assert not run.complete
            stage = run.load_stage("unit-000")
            assert stage is not None
            assert stage[0]["w"].tolist() == [0, 1, 2]
            assert stage[1] == {"loss": 0.5}
            assert run.load_stage("unit-001") is None

    def test_other_settings_are_listed_and_nothing_is_changed(self, tmp_path):
        start_unfinished(tmp_path)
        (tmp_path / ".lock").write_text("4711\n")  # as a killed process leaves it
        before = snapshot(tmp_path)
        with pytest.raises(InputError) as caught:
            RunDirectory.create(tmp_path, OTHER, resume=True)
        message = str(caught.value)
        assert 'settings.bits is stored as "w4a4", given as "w3a3"' in message
        assert "settings.model_args.depth is stored as 2, given as 3" in message
        assert "settings.seed is stored as 0, given as nothing" in message
        assert "settings.rank is stored as nothing, given as 5" in message
        assert "versions" not in message
        assert snapshot(tmp_path) == before

    def test_sections_outside_same_may_differ_and_the_stored_config_stays(self, tmp_path):
        start_unfinished(tmp_path)
        with RunDirectory.create(tmp_path, {**CONFIG, "versions": {"torch": "2"}}, resume=True) as run:
            assert run.config == CONFIG

    def test_settings_are_compared_as_they_are_stored(self, tmp_path):
        config = {"settings": {"data": Path("a/b"), "size": (1, 2), "limit": float("inf")}}
        RunDirectory.create(tmp_path, config, resume=False).close()
        with RunDirectory.create(tmp_path, config, resume=True) as resumed:
            assert not resumed.complete

    @pytest.mark.parametrize("resume", [False, True])
    @pytest.mark.parametrize("content", [b'{"settings": {"bi', b"", b"[1]"])
    def test_a_damaged_config_is_refused_and_kept(self, tmp_path, content, resume):
        start_unfinished(tmp_path)
        (tmp_path / "config.json").write_bytes(content)
        before = snapshot(tmp_path)
        with pytest.raises(InputError, match=r"config\.json is damaged"):
            RunDirectory.create(tmp_path, CONFIG, resume=resume)
        assert snapshot(tmp_path) == before

    def test_files_a_kill_left_half_written_are_removed(self, tmp_path):
        start_unfinished(tmp_path)
        for folder in (tmp_path, tmp_path / "checkpoint"):
            (folder / ".x.safetensors.00.partial").write_bytes(b"half")
        RunDirectory.create(tmp_path, CONFIG, resume=True).close()
        assert not [name for name in snapshot(tmp_path) if name.endswith(".partial")]


class TestLocking:
    def test_a_second_process_is_locked_out_until_the_first_is_killed(self, tmp_path):
        with holding_process(tmp_path / "run") as (process, _):
            for resume in (False, True):
                with pytest.raises(InputError, match=f"run is in use by process {process.pid}$"):
                    RunDirectory.create(tmp_path / "run", CONFIG, resume=resume)
            process.send_signal(signal.SIGKILL)
            process.wait()
            RunDirectory.create(tmp_path / "run", {"settings": {}}, resume=True).close()

    def test_a_surviving_worker_does_not_keep_the_lock(self, tmp_path):
        with holding_process(tmp_path / "run", "fork") as (process, worker):
            process.send_signal(signal.SIGKILL)
            process.wait()
            os.kill(worker, 0)  # raises if it is gone
            with RunDirectory.create(tmp_path / "run", {"settings": {}}, resume=True) as run:
                assert not run.complete

    def test_the_same_process_cannot_open_it_twice(self, tmp_path):
        with (
            RunDirectory.create(tmp_path, CONFIG, resume=False),
            pytest.raises(InputError, match=f"in use by process {os.getpid()}"),
        ):
            RunDirectory.create(tmp_path, CONFIG, resume=True)
        RunDirectory.create(tmp_path, CONFIG, resume=True).close()

    def test_readers_need_no_lock(self, tmp_path):
        start_finished(tmp_path)
        with RunDirectory.create(tmp_path, CONFIG, resume=True):
            assert RunDirectory.open_existing(tmp_path).read_metrics() == {"top1": 80.0}


class TestEvents:
    def test_events_come_back_in_order_with_their_time(self, tmp_path):
        with RunDirectory.create(tmp_path, CONFIG, resume=False) as run:
            assert run.read_events() == []
            run.event("unit", index=0, loss=float("nan"), file=Path("a"))
            run.event("unit", index=1)
            first, second = run.read_events()
        assert (first["kind"], first["index"], first["loss"], first["file"]) == ("unit", 0, None, "a")
        assert second["index"] == 1
        assert first["time"].endswith("+00:00")

    @pytest.mark.parametrize("torn", [b'{"time": "2', b'{"kind": "\xc3'])
    def test_a_torn_line_loses_only_itself(self, tmp_path, torn):
        start_unfinished(tmp_path)
        with open(tmp_path / "events.jsonl", "ab") as file:
            file.write(torn)
        with RunDirectory.create(tmp_path, CONFIG, resume=True) as run:
            assert [event["kind"] for event in run.read_events()] == ["started"]
            run.event("resumed")
            run.event("finished")
            assert [event["kind"] for event in run.read_events()] == ["started", "resumed", "finished"]
        assert torn + b"\n{" in (tmp_path / "events.jsonl").read_bytes()


class TestCheckpoint:
    @pytest.mark.parametrize("damage", ["truncate", "flip"])
    def test_a_damaged_stage_is_named_with_the_way_out(self, tmp_path, damage):
        start_unfinished(tmp_path)
        file = tmp_path / "checkpoint" / "unit-000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content if damage == "flip" else content[:-1])
        with RunDirectory.create(tmp_path, CONFIG, resume=True) as run:
            with pytest.raises(InputError, match=r"unit-000\.safetensors is damaged.*delete that one file"):
                run.load_stage("unit-000")
            file.unlink()
            assert run.load_stage("unit-000") is None

    def test_a_full_disk_keeps_the_earlier_stage(self, tmp_path, monkeypatch):
        with RunDirectory.create(tmp_path, CONFIG, resume=False) as run:
            run.save_stage("unit-000", {"w": torch.zeros(2)}, {})
            before = snapshot(tmp_path)
            with full_disk(monkeypatch), pytest.raises(FimaqError, match=r"unit-000.*No space left"):
                run.save_stage("unit-000", {"w": torch.ones(2)}, {})
            assert snapshot(tmp_path) == before

    @pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden"])
    def test_a_stage_cannot_leave_its_folder(self, tmp_path, name):
        with (
            RunDirectory.create(tmp_path, CONFIG, resume=False) as run,
            pytest.raises(ValueError, match="stage"),
        ):
            run.save_stage(name, {}, {})


class TestFinished:
    def test_results_are_there_and_the_checkpoint_is_gone(self, tmp_path):
        start_finished(tmp_path)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [
            ".lock", "config.json", "events.jsonl", "metrics.json", "model.safetensors",
        ]  # fmt: skip
        run = RunDirectory.open_existing(tmp_path)
        tensors, metadata = run.read_model()
        assert run.complete
        assert run.config == CONFIG
        assert tensors["w"].tolist() == [0, 1, 2, 3]
        assert metadata == {"bits": 4}

    def test_it_is_not_overwritten(self, tmp_path):
        start_finished(tmp_path)
        before = snapshot(tmp_path)
        with pytest.raises(InputError, match="already holds a finished run; choose another --out or remove it"):
            RunDirectory.create(tmp_path, CONFIG, resume=False)
        with pytest.raises(InputError, match="already holds a finished run"):
            RunDirectory.check(tmp_path, resume=False)
        with pytest.raises(InputError, match="other settings"):
            RunDirectory.create(tmp_path, OTHER, resume=True)
        assert snapshot(tmp_path) == before

    def test_resume_opens_it_and_tidies_up(self, tmp_path):
        start_finished(tmp_path)
        (tmp_path / "checkpoint").mkdir()  # as after a kill between the last two steps of finish()
        with RunDirectory.create(tmp_path, CONFIG, resume=True) as run:
            assert run.complete
        assert not (tmp_path / "checkpoint").exists()

    def test_a_full_disk_while_finishing_leaves_the_run_resumable(self, tmp_path, monkeypatch):
        start_unfinished(tmp_path)
        with RunDirectory.create(tmp_path, CONFIG, resume=True) as run:
            with full_disk(monkeypatch), pytest.raises(FimaqError):
                run.finish({"w": torch.ones(1)}, {}, {})
            assert not run.complete
        with RunDirectory.create(tmp_path, CONFIG, resume=True) as run:
            assert run.load_stage("unit-000") is not None

    def test_readers_refuse_what_is_not_a_finished_run(self, tmp_path):
        for path in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(InputError, match="not a run directory"):
                RunDirectory.open_existing(path)
        start_unfinished(tmp_path / "run")
        with pytest.raises(InputError, match=r"incomplete.*--resume"):
            RunDirectory.open_existing(tmp_path / "run")

    def test_readers_cannot_change_the_run(self, tmp_path):
        start_finished(tmp_path)
        run = RunDirectory.open_existing(tmp_path)
        with pytest.raises(RuntimeError, match="not held"):
            run.finish({}, {}, {})

    def test_a_flipped_bit_in_the_model_is_refused(self, tmp_path):
        start_finished(tmp_path)
        content = bytearray((tmp_path / "model.safetensors").read_bytes())
        content[-1] ^= 0x10
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(InputError, match=r"model\.safetensors is damaged"):
            RunDirectory.open_existing(tmp_path).read_model()


class TestMetrics:
    def test_new_entries_replace_their_namesakes_only(self, tmp_path):
        start_finished(tmp_path)
        run = RunDirectory.open_existing(tmp_path)
        run.update_metrics({"evaluation": {"top1": 79.5}})
        run.update_metrics({"evaluation": {"top5": 95.0}})
        assert run.read_metrics() == {"top1": 80.0, "evaluation": {"top5": 95.0}}

    def test_writers_side_by_side_lose_nothing(self, tmp_path):
        start_finished(tmp_path)
        runs = [RunDirectory.open_existing(tmp_path) for _ in range(16)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda item: item[1].update_metrics({f"entry{item[0]}": item[0]}), enumerate(runs)))
        assert len(runs[0].read_metrics()) == 1 + len(runs)

    def test_damaged_metrics_are_kept_for_the_user_to_see(self, tmp_path):
        start_finished(tmp_path)
        (tmp_path / "metrics.json").write_text('{"top1": ')
        with pytest.raises(InputError, match=r"metrics\.json is damaged"):
            RunDirectory.open_existing(tmp_path).update_metrics({"a": 1})
        assert (tmp_path / "metrics.json").read_text() == '{"top1": '
