"""Serves a moving picture by RTSP on loopback; every picture carries the time it was made.

Run by the system's Python, which has GStreamer's bindings (Debian: gir1.2-gst-rtsp-server-1.0, python3-gi,
gstreamer1.0-plugins-base, -good, -bad and -ugly):

    /usr/bin/python3 tests/rtsp_server.py [--port 8554] [--fps 25] [--width 640] [--height 360]
        [--user U --password-env V]

Prints the port when it is ready, and ends when its stdin closes. The time (monotonic clock, milliseconds, 32 bits) is
drawn as 4 rows of 8 black or white squares of 16 px at the top left; `age_ms` in tests/rtsp.py reads
it.
"""

import argparse
import os
import random
import sys
import threading
import time

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtsp", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtsp, GstRtspServer  # noqa: E402

SQUARE_PX = 16


class Factory(GstRtspServer.RTSPMediaFactory):
    """One shared encoder for everybody who connects."""

    def __init__(self, width: int, height: int, fps: int) -> None:
        super().__init__()
        self.width, self.height, self.fps = width, height, fps
        self.number = 0
        noise = random.Random(5)
        tile = [bytes(noise.randrange(40, 216) for _ in range(width // 8 + 1)) for _ in range(height // 8 + 1)]
        self.rows = [b"".join(bytes([v]) * 8 for v in tile[y // 8])[:width] for y in range(height)]
        self.set_launch(
            f"( appsrc name=source is-live=true format=time do-timestamp=true max-buffers=2 "
            f"caps=video/x-raw,format=GRAY8,width={width},height={height},framerate={fps}/1 "
            f"! videoconvert ! x264enc tune=zerolatency speed-preset=ultrafast key-int-max={fps} bitrate=2000 "
            f"! video/x-h264,profile=baseline ! rtph264pay name=pay0 pt=96 config-interval=1 )"
        )
        self.set_shared(True)
        self.set_protocols(GstRtsp.RTSPLowerTrans.TCP)

    def do_configure(self, media: GstRtspServer.RTSPMedia) -> None:
        """Start drawing when somebody watches."""
        source = media.get_element().get_child_by_name("source")
        GLib.timeout_add(1000 // self.fps, self.push, source)

    def push(self, source: Gst.Element) -> bool:
        """Draw and hand on one picture; false ends the timer."""
        self.number += 1
        shift = (self.number * 4) % self.width
        rows = [row[shift:] + row[:shift] for row in self.rows]
        made = int(time.monotonic() * 1000) & 0xFFFFFFFF
        for line in range(4):
            bits = [(made >> (line * 8 + bit)) & 1 for bit in range(8)]
            squares = b"".join((b"\xff" if bit else b"\x00") * SQUARE_PX for bit in bits)
            for y in range(line * SQUARE_PX, (line + 1) * SQUARE_PX):
                rows[y] = squares + rows[y][len(squares) :]
        return source.emit("push-buffer", Gst.Buffer.new_wrapped(b"".join(rows))) == Gst.FlowReturn.OK


def main() -> None:
    """Serve until stdin closes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fps", type=int, default=25)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--height", type=int, default=360)
    parser.add_argument("--user")
    parser.add_argument("--password-env")
    arguments = parser.parse_args()
    Gst.init(None)
    server = GstRtspServer.RTSPServer()
    server.set_address("127.0.0.1")
    server.set_service(str(arguments.port))
    factory = Factory(arguments.width, arguments.height, arguments.fps)
    if arguments.user:
        auth = GstRtspServer.RTSPAuth()
        token = GstRtspServer.RTSPToken()
        token.set_string("media.factory.role", "watcher")
        auth.set_supported_methods(GstRtsp.RTSPAuthMethod.DIGEST)
        auth.add_digest(arguments.user, os.environ[arguments.password_env], token)
        server.set_auth(auth)
        permissions = GstRtspServer.RTSPPermissions()
        permissions.add_permission_for_role("watcher", "media.factory.access", True)
        permissions.add_permission_for_role("watcher", "media.factory.construct", True)
        factory.set_permissions(permissions)
    server.get_mount_points().add_factory("/live", factory)
    if server.attach(None) == 0:
        sys.exit("the port is taken")
    loop = GLib.MainLoop()

    def end_with_stdin() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_stdin, daemon=True).start()
    print(server.get_bound_port(), flush=True)
    loop.run()


if __name__ == "__main__":
    main()
