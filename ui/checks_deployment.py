"""The doctor's checks of what the configuration names: a running server, weights, cameras, ports."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from pipeline.addresses import kind_of, mask_source
from pipeline.config import CameraConfig, Config
from pipeline.webcams import list_webcams
from pipeline.weights import SAMPLE_WEIGHTS, is_official
from samples.vlm import SampleModelError, cache_folder, checkpoint_path, is_complete
from serving.attach import describe_running
from serving.command import ServerError
from serving.config import SAMPLE_MODEL
from serving.server import check_port
from ui.findings import Finding, missing, note, ok

_CONNECT_S = 3.0
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_DEFAULT_PORTS = {"rtsp": 554, "rtsps": 322, "http": 80, "https": 443}


def check_attached_server(config: Config) -> list[Finding]:
    """Somebody else's model server, where the configuration names one."""
    server = config.serving.server
    if server.base_url is None:
        return []
    area, key = "model server", os.environ.get(server.api_key_env)
    try:
        running = asyncio.run(describe_running(server.endpoint, key, model=server.served_model_name))
    except ServerError as error:
        mend = f"start it, or mend serving.server.base_url; a key goes into ${server.api_key_env}"
        return [missing(area, mask_source(str(error)), mend)]
    names = ", ".join(running.models)
    if server.served_model_name is not None and server.served_model_name not in running.models:
        return [
            missing(area, f"serves {names}, not {server.served_model_name}", "mend serving.server.served_model_name")
        ]
    version = f" (vLLM {running.version})" if running.version else ""
    budget = f", step budget {running.step_budget}" if running.step_budget else ""
    return [ok(area, f"{mask_source(server.endpoint)} serves {names}{version}{budget}")]


def check_model(config: Config) -> list[Finding]:
    """The weights of the model that is to be served here."""
    server = config.serving.server
    if server.base_url is not None:
        return []
    if server.model == SAMPLE_MODEL:
        return [_sample_model()]
    folder = Path(server.model).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return [ok("model", str(folder))]
        return [missing("model", f"{folder} holds no config.json", "serving.server.model: a folder with a model")]
    if _HUB_NAME.fullmatch(server.model):
        return [_hub_model(server.model)]
    return [missing("model", f"{server.model}: no such folder", "name a folder, a hub's OWNER/NAME, or sample")]


def _sample_model() -> Finding:
    try:
        folder = checkpoint_path()
    except SampleModelError as error:
        return missing("model", str(error), "git checkout samples/weights")
    if is_complete(folder):
        return ok("model", f"sample, built in {folder}")
    return ok("model", "sample, built at the first start (once, some 20 s)")


def _hub_model(name: str) -> Finding:
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")) / "hub")
    cached = hub.expanduser() / f"models--{name.replace('/', '--')}" / "snapshots"
    if cached.is_dir() and any(cached.iterdir()):
        return ok("model", f"{name}, downloaded before")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return missing("model", f"{name} is not here and HF_HUB_OFFLINE is set", "unset HF_HUB_OFFLINE once")
    home = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    problem = _connect(home)
    if problem:
        mend = "connect to the hub, or name a folder in serving.server.model"
        return missing("model", f"{name} is not here and {problem}", mend)
    return ok("model", f"{name}, downloaded at the first start from {urlsplit(home).hostname}")


def check_detector(config: Config) -> list[Finding]:
    """The detector's weights. Nothing is downloaded here."""
    name = config.detect.weights
    area = "detector"
    path = SAMPLE_WEIGHTS if name == "sample" else Path(name).expanduser()
    if path.is_file():
        return [ok(area, "sample weights" if name == "sample" else str(path))]
    if not is_official(name):
        return [missing(area, f"{name}: no such file", "detect.weights: a file, yolo26n.pt (s, m, l, x), or sample")]
    if (cache_folder() / "weights" / name).is_file():
        return [ok(area, f"{name}, downloaded before")]
    return [
        note(
            area,
            f"{name} is downloaded at the first start; where that fails, the sample weights are used with a warning",
            f"or put {name} somewhere and name it in detect.weights",
        )
    ]


def check_cameras(config: Config) -> list[Finding]:
    """Every camera of the configuration, and the webcams there are."""
    findings = [_check_camera(camera) for camera in config.cameras]
    for device in list_webcams():
        if os.access(device.path, os.R_OK | os.W_OK):
            findings.append(ok("webcam", f"{device.index}: {device.name} ({device.path})"))
        else:
            findings.append(note("webcam", f"{device.path} may not be opened", _video_group()))
    if not findings:
        findings.append(ok("cameras", "none configured; add one in the page, or with --source"))
    return findings


def _check_camera(camera: CameraConfig) -> Finding:
    area = f"camera {camera.name}"
    if camera.password_env is not None and not os.environ.get(camera.password_env):
        return missing(area, f"${camera.password_env} is not set", f"export {camera.password_env}=...")
    try:
        kind = kind_of(camera.source)
    except ValueError as error:
        return missing(area, str(error), "mend its source")
    if kind == "sample":
        return ok(area, "sample video")
    if kind == "webcam":
        return _check_webcam(area, camera.source)
    shown = mask_source(camera.source)
    if kind == "url":
        problem = mask_source(_connect(camera.source))
        mend = "its address; it is tried again and again"
        return note(area, f"{shown}: {problem}", mend) if problem else ok(area, f"{shown} answers")
    there = Path(camera.source).exists()
    return ok(area, shown) if there else missing(area, f"{shown}: no such file", "mend its source")


def _check_webcam(area: str, source: str) -> Finding:
    device = Path(f"/dev/video{source}") if source.isdigit() else Path(source)
    if not device.exists():
        return missing(area, f"{device} is not there", "plug it in, or choose another source")
    if not os.access(device, os.R_OK | os.W_OK):
        return missing(area, f"{device} may not be opened", _video_group())
    return ok(area, str(device))


def _video_group() -> str:
    return "sudo usermod -aG video $USER, then log in again"


def _connect(url: str) -> str:
    """Why no connection to a URL's host can be made, or ""."""
    parts = urlsplit(url)
    try:
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme.lower(), 80)
        socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error) or "no answer"
        return f"{parts.hostname} does not answer ({reason})"
    return ""


def check_ports(config: Config) -> list[Finding]:
    """Whether the ports of the parts that would be started are free."""
    wanted = [
        ("service.port", config.service.host, config.service.port),
        ("ui.port", config.ui.host, config.ui.port),
    ]
    server = config.serving.server
    if server.base_url is None:
        wanted.insert(0, ("serving.server.port", server.host, server.port))
    findings = []
    for setting, host, port in wanted:
        try:
            check_port(host, port, setting)
        except ServerError as error:
            findings.append(missing("port", f"{port} ({setting}) is taken{_owner(port)}", _mend_port(error, setting)))
    if not findings:
        ports = ", ".join(f"{port} ({setting})" for setting, _, port in wanted)
        findings.append(ok("ports", f"free: {ports}"))
    return findings


def _mend_port(error: ServerError, setting: str) -> str:
    return f"stop what uses it, or --set {setting}=..." if "in use" in str(error) else str(error)


def _owner(port: int) -> str:
    """Which process listens on a port, as far as this user may know."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                return (
                    f" by {psutil.Process(connection.pid).name()}, process {connection.pid}" if connection.pid else ""
                )
    except (psutil.Error, OSError):
        pass
    return ""
