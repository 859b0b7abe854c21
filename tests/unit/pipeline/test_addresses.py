"""Passwords in addresses are refused and masked, and sources told apart."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.addresses import holds_password, is_local, kind_of, mask_source
from pipeline.config import CameraConfig, ConfigError, load_config

SECRETS = [
    pytest.param("rtsp://admin:s3cret@10.0.0.7:554/live", id="rtsp"),
    pytest.param("RTSP://admin:s3cret@cam/live", id="capital scheme"),
    pytest.param("rtsp://admin:s3cret/x@cam/live", id="slash in the password"),
    pytest.param("rtsp://admin:s3cret@x@cam/live", id="at sign in the password"),
    pytest.param("rtsp://:s3cret@cam/live", id="no user"),
    pytest.param("http://cam/mjpg?user=admin&password=s3cret", id="query"),
    pytest.param("http://cam/mjpg?pwd=s3cret&channel=1", id="query, first"),
    pytest.param("https://cam/hls.m3u8?token=s3cret", id="token"),
    pytest.param("http://cam/a;pwd=s3cret", id="matrix parameter"),
    pytest.param("rtsp://cam/user=admin_password=s3cret_channel=1_stream=0.sdp", id="in the path, as recorders do"),
    pytest.param("rtsp://cam:554/user=admin&password=s3cret&channel=1", id="query without its mark"),
    pytest.param("http://cam/videostream.cgi?loginuse=a&loginpas=s3cret", id="loginpas"),
    pytest.param("http://cam/live?usr=a&Pwd=s3cret", id="capital key"),
    pytest.param("http://cam/live?user_pw=s3cret", id="key of two words"),
    pytest.param("http://cam/live?auth_token=s3cret", id="a kind of token"),
    pytest.param("rtsp://cam/password={password}s3cret", id="more than the placeholder"),
]
HARMLESS = [
    pytest.param("rtsp://10.0.0.7:554/live", id="port"),
    pytest.param("rtsp://admin@10.0.0.7/live", id="user alone"),
    pytest.param("rtsp://cam:8554/live@2x", id="at sign in the path"),
    pytest.param("rtsp://[::1]:8554/live@2x", id="IPv6 and at sign in the path"),
    pytest.param("rtsp://cam:8554/live@2", id="at sign and a number in the path"),
    pytest.param("rtsp://[::1]:8554/live@2x/low", id="IPv6 and more after the at sign"),
    pytest.param("rtsp://cam:8554/live?mail=a@b/c", id="at sign in the query"),
    pytest.param("http://cam/mjpg?user=admin&password={password}", id="placeholder"),
    pytest.param("rtsp://cam/user=admin_password={password}_channel=1", id="placeholder in the path"),
    pytest.param("rtsp://cam/user=admin_password=_channel=1_stream=0.sdp", id="left empty"),
    pytest.param("http://cam/live?bypass=1&compass=2", id="other words that end alike"),
    pytest.param("http://cam/sort_key=1/live", id="a key in the path"),
    pytest.param("0", id="index"),
    pytest.param("video?password=1.mp4", id="a file's name"),
]


@pytest.mark.parametrize("source", SECRETS)
def test_a_password_is_refused_with_advice_and_never_shown(source: str) -> None:
    assert holds_password(source)
    with pytest.raises(ConfigError) as error:
        load_config(None).with_source(source)
    assert "password_env" in str(error.value)
    assert "s3cret" not in str(error.value)
    for text in (source, f"cannot open '{source}': no route", f"first {source} then\nmore"):
        assert "s3cret" not in mask_source(text)


@pytest.mark.parametrize("source", HARMLESS)
def test_what_holds_no_password_is_allowed(source: str) -> None:
    assert not holds_password(source)
    assert CameraConfig(name="c", source=source).source == source


@pytest.mark.parametrize(
    "source",
    ["rtsp://u:1234/5@h/x", "rtsp://u:1234/5@h:554", "rtsp://u:1234/5@10.0.0.7", "rtsp://u:1234/a@b@h/x"],
)
def test_a_password_that_looks_like_a_port_is_one_where_a_host_follows(source: str) -> None:
    assert holds_password(source)
    assert "1234" not in mask_source(source)


def test_masking_keeps_the_rest() -> None:
    assert mask_source("rtsp://admin:pw@cam:554/live?x=1") == "rtsp://***@cam:554/live?x=1"
    assert mask_source("http://cam/a?user=b&password=pw&c=d") == "http://cam/a?user=b&password=***&c=d"
    assert mask_source("two: rtsp://a:b@c/d and http://e:f@g/h.") == "two: rtsp://***@c/d and http://***@g/h."
    assert mask_source("/videos/yard.mp4") == "/videos/yard.mp4"
    assert mask_source("http://cam/a?loginuse=b&loginpas=c&d=e") == "http://cam/a?loginuse=b&loginpas=***&d=e"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        pytest.param("sample", "sample", id="sample"),
        pytest.param("sample-photos", "sample", id="second sample"),
        pytest.param("0", "webcam", id="index"),
        pytest.param("/dev/video2", "webcam", id="device"),
        pytest.param("/dev/v4l/by-id/usb-cam-index0", "webcam", id="device by name"),
        pytest.param("rtsp://cam/live", "url", id="rtsp"),
        pytest.param("HTTPS://cam/live", "url", id="https"),
        pytest.param("yard.mp4", "file", id="video"),
        pytest.param("yard.JPG", "pictures", id="picture"),
    ],
)
def test_kinds(source: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kind_of(source) == kind
    monkeypatch.setattr(Path, "is_dir", lambda _path: pytest.fail("the file system was asked"))
    assert is_local(source) == (kind not in ("webcam", "url"))


def test_a_folder_is_pictures(tmp_path: Path) -> None:
    assert kind_of(str(tmp_path)) == "pictures"


@pytest.mark.parametrize("source", ["ftp://host/v.mp4", "file:///etc/passwd", "concat://a", "gopher://x/"])
def test_other_schemes_are_refused(source: str) -> None:
    with pytest.raises(ValueError, match="rtsp://"):
        kind_of(source)
    assert not is_local(source)
