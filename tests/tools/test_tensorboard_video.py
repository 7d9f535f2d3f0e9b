"""Settings and videos as TensorBoard reads them."""

import io

import pytest
import torch
from PIL import Image
from runs import TINY

from a2c.cli import commands as cli
from a2c.config.extras import has_extra
from a2c.metrics.logger import EventFile
from a2c.tools import record_video

needs_tensorboard = pytest.mark.skipif(not has_extra("tensorboard"), reason="needs the package tensorboard")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    found = tmp_path_factory.mktemp("runs") / "run"
    args = [*TINY, "--total-env-steps", "80", "--gamma", "0.5", "--no-progress"]
    assert cli.train([*args, "--run-dir", str(found)]) == 0
    assert cli.main(["record", str(found), "--tensorboard"]) == 0
    return found


@needs_tensorboard
def test_tensorboard_reads_settings_scalars_and_video(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run_dir / "tensorboard"))
    board.Reload()
    assert {"loss/loss_value", "time/speed"} <= set(board.Tags()["scalars"])
    (table,) = board.Tensors("config/text_summary")
    lines = table.tensor_proto.string_val[0].decode().splitlines()
    assert lines[:2] == ["| setting | value | default |", "| --- | --- | --- |"]
    assert "| gamma | 0.5 | 0.99 |" in lines[2:12]  # those that are not the default come first
    video = EventAccumulator(str(run_dir / "tensorboard" / "video"))
    video.Reload()
    (image,) = video.Images("video")
    picture = Image.open(io.BytesIO(image.encoded_image_string))
    assert (picture.format, picture.size, image.step) == ("GIF", (image.width, image.height), 80)
    assert picture.n_frames > 5
    assert image.encoded_image_string == (run_dir / "episode.gif").read_bytes()


def test_a_video_for_tensorboard_is_a_gif(run_dir, tmp_path, capsys):
    assert cli.main(["record", str(run_dir), "--tensorboard", "--out", str(tmp_path / "film.mp4")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: out must end in .gif with tensorboard, got ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_policy_in_a_run_adds_to_its_events_and_one_elsewhere_is_refused(run_dir, tmp_path, capsys, monkeypatch):
    (run_dir / "policies").mkdir()
    for place in (run_dir / "policies", tmp_path):
        (place / "kept.pt").write_bytes((run_dir / "latest.pt").read_bytes())
    monkeypatch.chdir(run_dir / "policies")
    before, out = len(list((run_dir / "tensorboard/video").iterdir())), ["--out", str(tmp_path / "x.gif")]
    assert cli.main(["record", "kept.pt", "--tensorboard", "--max-length", "3", *out]) == 0
    assert len(list((run_dir / "tensorboard/video").iterdir())) == before + 1
    capsys.readouterr()
    assert cli.main(["record", str(tmp_path / "kept.pt"), "--tensorboard", *out]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: run_dir must be a run directory, or a file in one") and error.count("\n") == 1
    assert not (tmp_path / "tensorboard").exists()


def test_a_policy_that_a_run_keeps_meanwhile_is_not_taken_for_the_recorded_one(run_dir, tmp_path, capsys, monkeypatch):
    for name in ("config.json", "latest.pt"):
        (tmp_path / name).write_bytes((run_dir / name).read_bytes())
    write, steps = record_video.write_video, []

    def write_while_the_run_goes_on(*args):
        write(*args)
        torch.save({**torch.load(tmp_path / "latest.pt", weights_only=True), "env_steps": 90}, tmp_path / "best.pt")

    monkeypatch.setattr(record_video, "write_video", write_while_the_run_goes_on)
    monkeypatch.setattr(EventFile, "image", lambda self, tag, content, size, step: steps.append(step))
    assert cli.main(["record", str(tmp_path), "--tensorboard", "--max-length", "3"]) == 0
    assert steps == [80] and f" of {tmp_path / 'latest.pt'}, " in capsys.readouterr().out


def test_no_video_is_written_through_a_link(run_dir, tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "latest.pt").write_bytes((run_dir / "latest.pt").read_bytes())
    (tmp_path / "tensorboard").symlink_to(tmp_path / "elsewhere")
    assert cli.main(["record", str(tmp_path), "--tensorboard"]) == 1
    assert "must not be a link" in capsys.readouterr().err and list((tmp_path / "elsewhere").iterdir()) == []
