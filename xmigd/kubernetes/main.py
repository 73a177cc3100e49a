"""Entry of the adapter: `xmig-kubernetes [--config FILE]`."""

from __future__ import annotations

import signal

from xmigd import log
from xmigd.client import Client
from xmigd.configuration import from_command_line, run
from xmigd.errors import StartError
from xmigd.kubernetes.adapter import Adapter
from xmigd.kubernetes.api import Api
from xmigd.kubernetes.settings import KubernetesSettings
from xmigd.place import find_place, local_socket


def main() -> None:
    settings = from_command_line(KubernetesSettings, "xMIG's adapter to Kubernetes, one on each node")
    log.configure(settings.log_level, json=settings.log_json)
    run(KubernetesSettings.program, lambda: serve(settings))


def serve(settings: KubernetesSettings) -> None:
    """Until SIGTERM or SIGINT. Raises StartError."""
    try:
        place = find_place()
    except (OSError, ValueError) as error:
        raise StartError(f"xMIG's settings cannot be read: {error}", hint="XMIG_CONFIG names their file") from None
    adapter = Adapter(settings, Api(settings), Client(place), local_socket(place).parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: adapter.stop())
    adapter.run()


if __name__ == "__main__":
    main()
