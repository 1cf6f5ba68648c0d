"""A folder over HTTP, by a process of its own."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(SimpleHTTPRequestHandler):
    slow: Path

    def copyfile(self, source, outputfile):  # type: ignore[no-untyped-def]
        while data := source.read(1 << 10):
            if self.slow.exists() and self.path.endswith(".bin"):
                time.sleep(float(self.slow.read_text() or 0.02))
            outputfile.write(data)
            outputfile.flush()


class Served:
    """url: of the folder."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, log: Path) -> None:
        self._process, self.url, self._log = process, url, log

    def asked(self) -> list[str]:
        """The path of each GET so far."""
        return [line.split()[6] for line in self._log.read_text().splitlines() if '"GET ' in line]

    def stop(self) -> None:
        """Nothing answers from here on."""
        self._process.kill()
        self._process.wait()


@contextmanager
def served(folder: Path, slow: Path) -> Iterator[Served]:
    """Until the block ends.  slow: while this exists, a .bin takes 20 ms for each KB, or as many seconds as it says."""
    log = slow.with_name("asked.log")
    with log.open("w") as stream:
        process = subprocess.Popen([sys.executable, __file__, folder, slow], stdout=subprocess.PIPE, stderr=stream, text=True)
        assert process.stdout is not None
        found = Served(process, f"http://127.0.0.1:{process.stdout.readline().strip()}", log)
        try:
            yield found
        finally:
            found.stop()
            process.stdout.close()


if __name__ == "__main__":
    _Handler.slow = Path(sys.argv[2])
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=sys.argv[1]))
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()
