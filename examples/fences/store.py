"""A small object store: GET and PUT of objects, ETags, If-Match and If-None-Match, as S3 and its likes have them.

Its ETag is the MD5 of the body, as that of S3 is for an object that was put in one piece.
"""

import hashlib
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Store(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes] = {}
    one_at_a_time = threading.Lock()  # a comparison and its write are one step

    def do_GET(self):
        body = self.objects.get(self.path)
        if body is None:
            self.answer(404)
        else:
            self.answer(200, body)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with self.one_at_a_time:
            old = self.objects.get(self.path)
            wanted = self.headers.get("If-Match")
            refused = (wanted is not None and wanted != etag(old)) or (
                self.headers.get("If-None-Match") == "*" and old is not None
            )
            if not refused:
                self.objects[self.path] = body
        self.answer(412 if refused else 200, b"", etag(body))

    def answer(self, status, body=b"", tag=None):
        self.send_response(status)
        self.send_header("ETag", tag or etag(body))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def etag(body):
    return None if body is None else f'"{hashlib.md5(body).hexdigest()}"'


def serve(port=0):
    """Serve in the background. Returns the URL."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Store)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


if __name__ == "__main__":
    print(serve(int(sys.argv[1]) if len(sys.argv) > 1 else 0), flush=True)
    threading.Event().wait()
