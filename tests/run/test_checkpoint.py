"""Checkpoints: written atomically, and read without trusting them."""

import os
import pickle
from stat import S_ISDIR

import pytest
import torch
from toys import TinyNet

import a2c
from a2c.run import checkpoint
from a2c.run.checkpoint import FORMAT, CheckpointError, load_checkpoint, save_checkpoint


def state_of(net, **changes):
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3))[1].sum().backward()
    optimizer.step()  # so that the optimiser has moments to keep
    state = {"config": "{}", "network": net.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {
        "input_shape": [3],
        "n_actions": 5,
        "algorithm": {},
        "metrics": {},
        "scores": {},
        "saved_best": 1.5,
        "seconds": 2.5,
    }
    return state | {"env_steps": 40, "updates": 2, "generators": [torch.Generator().get_state()], **changes}


def one_line(refusal):
    message = str(refusal.value)
    assert "\n" not in message and message.startswith("checkpoint ")
    return message


def test_checkpoint_round_trip(tmp_path):
    net, path = TinyNet(seed=1), tmp_path / "latest.pt"
    state = state_of(net)
    save_checkpoint(path, state)
    loaded = load_checkpoint(path)
    assert (loaded["format"], loaded["version"]) == (FORMAT, a2c.__version__)
    assert (loaded["env_steps"], loaded["updates"]) == (40, 2)
    assert torch.equal(loaded["generators"][0], state["generators"][0])
    torch.testing.assert_close(loaded["optimizer"], state["optimizer"], rtol=0, atol=0)
    other = TinyNet(seed=2)
    other.load_state_dict(loaded["network"])
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert [file.name for file in tmp_path.iterdir()] == ["latest.pt"]


def test_checkpoint_that_cannot_be_written_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "latest.pt"
    save_checkpoint(path, state_of(TinyNet()))
    before = path.read_bytes()

    def disk_full(state, file):
        file.write(b"half of a checkpoint")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", disk_full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(path, state_of(TinyNet()))
    assert path.read_bytes() == before


@pytest.mark.parametrize("hard_links", [True, False])
def test_checkpoint_before_the_last_is_kept_and_offered(hard_links, tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError("Operation not permitted")

    if not hard_links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "latest.pt"
    for env_steps in (40, 80, 120):
        save_checkpoint(path, state_of(TinyNet(), env_steps=env_steps), keep_previous=True)
    assert load_checkpoint(path)["env_steps"] == 120
    assert load_checkpoint(tmp_path / "previous.pt")["env_steps"] == 80
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(path)
    assert f"rename {tmp_path / 'previous.pt'} to latest.pt" in one_line(refusal)
    (tmp_path / "metrics.csv").write_text("env_steps\n")
    with pytest.raises(CheckpointError, match=r"not a checkpoint \(File is not a zip file\)$"):
        load_checkpoint(tmp_path / "metrics.csv")
    (tmp_path / "metrics.csv").unlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["latest.pt", "previous.pt"]


def test_checkpoint_is_on_disk_before_it_replaces_the_old_file(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("directory" if S_ISDIR(os.fstat(fd).st_mode) else "file"))
    monkeypatch.setattr(os, "replace", lambda source, target: calls.append("replace"))
    save_checkpoint(tmp_path / "latest.pt", state_of(TinyNet()))
    assert calls == ["file", "replace", "directory"]


def test_checkpoint_is_written_where_a_directory_cannot_be_synced(tmp_path, monkeypatch):
    fsync = os.fsync

    def refuse(fd):
        if S_ISDIR(os.fstat(fd).st_mode):
            raise OSError("Invalid argument")
        fsync(fd)

    monkeypatch.setattr(os, "fsync", refuse)
    save_checkpoint(tmp_path / "latest.pt", state_of(TinyNet()))
    assert load_checkpoint(tmp_path / "latest.pt")["env_steps"] == 40


def test_best_checkpoint_that_is_damaged_names_the_last_one_where_there_is_one(tmp_path):
    best = tmp_path / "best.pt"
    best.write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError, match=r"File is not a zip file\)$"):
        load_checkpoint(best)
    save_checkpoint(tmp_path / "latest.pt", state_of(TinyNet()))
    with pytest.raises(CheckpointError, match=r"\); the last checkpoint of the run is latest\.pt$"):
        load_checkpoint(best)


def test_checkpoint_that_is_missing_is_refused(tmp_path):
    for path in (tmp_path / "latest.pt", tmp_path):
        with pytest.raises(CheckpointError) as refusal:
            load_checkpoint(path)
        assert str(path) in one_line(refusal)


def test_checkpoint_that_may_not_be_read_does_not_count_as_damaged(tmp_path, monkeypatch):
    for name in ("previous.pt", "latest.pt"):
        save_checkpoint(tmp_path / name, state_of(TinyNet()))
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK)  # the tests may run as root
    with pytest.raises(CheckpointError, match=r"latest\.pt cannot be read: permission denied$"):
        load_checkpoint(tmp_path / "latest.pt")


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, -1])
def test_checkpoint_that_is_truncated_is_refused(tmp_path, keep):
    path = tmp_path / "latest.pt"
    save_checkpoint(path, state_of(TinyNet()))
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(path)
    assert str(path) in one_line(refusal) and "damaged" in str(refusal.value)


@pytest.mark.parametrize(
    "content", [b"hello, world\n", bytes(range(256)) * 8, b"\x80\x02.", b"PK\x03\x04" + bytes(64), b"\x89PNG\r\n\x1a\n"]
)
def test_checkpoint_that_is_another_kind_of_file_is_refused(tmp_path, content):
    path = tmp_path / "latest.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(path)
    assert str(path) in one_line(refusal)


@pytest.mark.parametrize("state", [{"weight": torch.ones(2)}, [1, 2], torch.ones(2), 3])
def test_checkpoint_of_another_program_is_refused(tmp_path, state):
    path = tmp_path / "latest.pt"
    torch.save(state, path)
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(path)
    assert "not one of a2c's" in one_line(refusal)


def test_checkpoint_of_a_newer_format_is_refused(tmp_path):
    path = tmp_path / "latest.pt"
    torch.save({"format": FORMAT + 1, "version": "9.8.7", **state_of(TinyNet())}, path)
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(path)
    message = one_line(refusal)
    assert f"written by a2c 9.8.7 in format {FORMAT + 1}" in message and message.endswith(": update a2c")


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_checkpoint_of_an_older_format_is_refused_with_its_version(number, tmp_path):
    path = tmp_path / "latest.pt"
    torch.save({"format": number, "network": {}}, path)  # before the entries are checked
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(path)
    message = one_line(refusal)
    assert f"written by a2c 0.1.0 in format {number}, a2c {a2c.__version__} reads format {FORMAT}" in message
    assert message.endswith("install a2c 0.1.0 to continue this run, or start a new one")


class Bomb:
    """Unpickling it creates a file: a stand-in for anything worse."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return open, (str(self.target), "w")


@pytest.mark.parametrize("save", [torch.save, lambda state, path: path.write_bytes(pickle.dumps(state, protocol=2))])
def test_checkpoint_with_malicious_code_is_not_executed(tmp_path, save):
    path, target = tmp_path / "latest.pt", tmp_path / "executed"
    save({"format": FORMAT, "version": a2c.__version__, **state_of(TinyNet(), bomb=Bomb(target))}, path)
    with pytest.raises(CheckpointError) as refusal:
        load_checkpoint(path)
    one_line(refusal)
    assert not target.exists()


def test_checkpoint_that_cannot_be_written_leaves_the_two_before_it(tmp_path, monkeypatch):
    path, previous = tmp_path / "latest.pt", tmp_path / "previous.pt"
    for env_steps in (1, 2):
        save_checkpoint(path, {"env_steps": env_steps}, keep_previous=True)
    before = path.read_bytes(), previous.read_bytes()

    def refuse(path, content):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "write_atomically", refuse)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(path, {"env_steps": 3}, keep_previous=True)
    assert (path.read_bytes(), previous.read_bytes()) == before


def test_previous_checkpoint_is_synced_too_where_there_are_no_hard_links(tmp_path, monkeypatch):
    path, synced, fsync = tmp_path / "latest.pt", [], os.fsync

    def refuse(source, target):
        raise PermissionError("Operation not permitted")

    save_checkpoint(path, {"env_steps": 1})
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_ino) or fsync(fd))
    save_checkpoint(path, {"env_steps": 2}, keep_previous=True)
    assert {(tmp_path / name).stat().st_ino for name in ("latest.pt", "previous.pt")} <= set(synced)
