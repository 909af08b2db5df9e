"""The API server: the calls that KubernetesPodOperator and its trigger make, over real HTTP.

Every pod that comes in or goes out must survive a round trip through the official client's generated
types, which are made from Kubernetes' OpenAPI document: an unknown or missing field is an error here.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from kubernetes import client

from tests.kube.cluster import Cluster, Json

_PODS = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/pods(?:/(?P<name>[^/]+))?(?P<log>/log)?")
_EVENTS = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/events")
_EVENT_FIELD = re.compile(r"involvedObject\.(?P<field>kind|namespace|name|uid)=(?P<value>[^,]*)")
_MICROSECONDS = re.compile(r"\.\d+(?=Z)")


class KubeServer:
    """Serves a cluster on a port of its own, until closed. A context manager."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.requests: list[tuple[str, str]] = []
        """Method and path of every request."""
        self.outage = 0
        """How many of the next requests get no better answer than 503."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> KubeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_kubeconfig(self, path: Path) -> Path:
        """A kubeconfig file that leads here."""
        entry = {"cluster": {"server": self.url}, "name": "test"}
        context = {"context": {"cluster": "test", "user": "test", "namespace": "default"}, "name": "test"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [entry],
            "users": [{"name": "test", "user": {"token": "not-a-secret"}}],
            "contexts": [context],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def close(self) -> None:
        """Stop serving and kill the pods."""
        self._server.shutdown()
        self._server.server_close()
        self.cluster.close()


def checked(data: Json, kind: str) -> Json:
    """`data` if the client's type `kind` holds all of it.

    Raises:
        ValueError: a field is unknown to the type, lacks, or has another form there.
    """
    api = client.ApiClient()
    typed = api.deserialize(SimpleNamespace(data=json.dumps(data)), kind)
    back = api.sanitize_for_serialization(typed)
    if _normal(back) != _normal(data):
        raise ValueError(f"{kind} loses something on the way: {data} became {back}")
    return data


def selector(text: str) -> Callable[[Mapping[str, str]], bool]:
    """A label selector: `a=b`, `a!=b`, `a`, `!a`, joined by commas."""

    def matches(labels: Mapping[str, str]) -> bool:
        for term in filter(None, text.split(",")):
            if "!=" in term:
                name, value = term.split("!=")
                if labels.get(name) == value:
                    return False
            elif "=" in term:
                name, value = term.replace("==", "=").split("=")
                if labels.get(name) != value:
                    return False
            elif term.startswith("!"):
                if term[1:] in labels:
                    return False
            elif term not in labels:
                return False
        return True

    return matches


def _normal(data: Any) -> Any:
    """Times without fractions; empty maps and lists away, which the client does not tell from none."""
    if isinstance(data, dict):
        cleaned = {key: _normal(value) for key, value in data.items()}
        return {key: value for key, value in cleaned.items() if value not in (None, {}, [])}
    if isinstance(data, list):
        return [_normal(value) for value in data]
    if isinstance(data, str) and re.match(r"\d{4}-\d\d-\d\dT", data):
        return _MICROSECONDS.sub("", data.replace("+00:00", "Z"))
    return data


def _handler(server: KubeServer) -> type[BaseHTTPRequestHandler]:
    cluster = server.cluster

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            if server.outage > 0:
                server.outage -= 1
                self._body()
                self._refuse(
                    HTTPStatus.SERVICE_UNAVAILABLE, "the server is shutting down", "ServiceUnavailable"
                )
                return False
            return True

        def do_GET(self) -> None:
            path, query = self._target()
            if (match := _EVENTS.fullmatch(path)) is not None:
                self._send_events(match["namespace"], query.get("fieldSelector", ""))
            elif path == "/version":
                self._send({"major": "1", "minor": "31", "gitVersion": "v1.31.0"})
            elif (match := _PODS.fullmatch(path)) is None:
                self._refuse(HTTPStatus.NOT_FOUND, "no such path")
            elif match["name"] is None:
                pods = cluster.list(match["namespace"], selector(query.get("labelSelector", "")))
                meta = {"resourceVersion": cluster.resource_version}
                items = [checked(_public(p), "V1Pod") for p in pods]
                self._send({"apiVersion": "v1", "kind": "PodList", "metadata": meta, "items": items})
            elif match["log"]:
                self._send_log(match["namespace"], match["name"], query)
            else:
                self._send_pod(cluster.get(match["namespace"], match["name"]), match["name"])

        def do_POST(self) -> None:
            path, _ = self._target()
            match = _PODS.fullmatch(path)
            body = self._body()
            if match is None or match["name"]:
                self._refuse(HTTPStatus.NOT_FOUND, "no such path")
                return
            try:
                pod = checked(body, "V1Pod")
            except ValueError as error:
                self._refuse(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
                return
            if cluster.refusal is not None:
                code, message = cluster.refusal
                self._refuse(HTTPStatus(code), message, "Forbidden")
                return
            created = cluster.create(match["namespace"], pod)
            if created is None:
                self._refuse(HTTPStatus.CONFLICT, "the name is taken", "AlreadyExists")
            else:
                self._send(checked(_public(created), "V1Pod"), HTTPStatus.CREATED)

        def do_PATCH(self) -> None:
            path, _ = self._target()
            match = _PODS.fullmatch(path)
            body = self._body()
            if match is None or match["name"] is None:
                self._refuse(HTTPStatus.NOT_FOUND, "no such path")
                return
            labels = body["metadata"]["labels"]
            self._send_pod(cluster.label(match["namespace"], match["name"], labels), match["name"])

        def do_DELETE(self) -> None:
            path, query = self._target()
            match = _PODS.fullmatch(path)
            body = self._body()
            if match is None or match["name"] is None:
                self._refuse(HTTPStatus.NOT_FOUND, "no such path")
                return
            grace = query.get("gracePeriodSeconds", body.get("gracePeriodSeconds"))
            seconds = None if grace is None else float(grace)
            self._send_pod(cluster.delete(match["namespace"], match["name"], seconds), match["name"])

        def log_message(self, *_: Any) -> None:
            """Keep the test's output quiet."""

        def _target(self) -> tuple[str, dict[str, str]]:
            url = urlsplit(self.path)
            server.requests.append((self.command, url.path))
            return url.path, {key: values[-1] for key, values in parse_qs(url.query).items()}

        def _body(self) -> Json:
            length = int(self.headers.get("Content-Length") or 0)
            found: Json = json.loads(self.rfile.read(length)) if length else {}
            return found

        def _send(self, data: Json, status: HTTPStatus = HTTPStatus.OK) -> None:
            payload = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def _send_pod(self, pod: Json | None, name: str) -> None:
            if pod is None:
                self._refuse(HTTPStatus.NOT_FOUND, f'pods "{name}" not found', "NotFound")
            else:
                self._send(checked(_public(pod), "V1Pod"))

        def _refuse(self, status: HTTPStatus, message: str, reason: str = "Invalid") -> None:
            answer = {
                "apiVersion": "v1",
                "kind": "Status",
                "metadata": {},
                "status": "Failure",
                "message": message,
                "reason": reason,
                "code": int(status),
            }
            self._send(answer, status)

        def _send_events(self, namespace: str, fields: str) -> None:
            terms = [_EVENT_FIELD.fullmatch(term) for term in filter(None, fields.split(","))]
            if None in terms:
                self._refuse(HTTPStatus.BAD_REQUEST, f"field label not supported: {fields}", "BadRequest")
                return
            asked = {term["field"]: term["value"] for term in terms if term}
            items = [checked(event, "CoreV1Event") for event in cluster.events(namespace, asked)]
            meta = {"resourceVersion": cluster.resource_version}
            self._send({"apiVersion": "v1", "kind": "EventList", "metadata": meta, "items": items})

        def _send_log(self, namespace: str, name: str, query: Mapping[str, str]) -> None:
            pod = cluster.get(namespace, name)
            container = cluster.container(pod) if pod else None
            if container is None:
                self._refuse(HTTPStatus.NOT_FOUND, f'pods "{name}" not found', "NotFound")
                return
            since = query.get("sinceSeconds")
            earliest = datetime.now(UTC) - timedelta(seconds=int(since)) if since else None
            stamped = query.get("timestamps", "").lower() == "true"
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            follow = query.get("follow", "").lower() == "true"
            for when, line in container.log(follow=follow, since=earliest):
                stamp = (
                    when.isoformat(timespec="microseconds").replace("+00:00", "Z") + " " if stamped else ""
                )
                chunk = f"{stamp}{line}\n".encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

    return Handler


def _public(pod: Json) -> Json:
    """A pod as the API tells it, without the cluster's own notes."""
    return {"apiVersion": "v1", "kind": "Pod", **{k: v for k, v in pod.items() if not k.startswith("_")}}
