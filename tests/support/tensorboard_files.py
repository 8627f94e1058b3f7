"""TensorBoard's event files, read without TensorBoard."""

import struct
from pathlib import Path


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows, (step, value) by tag: a start at a step removes what earlier files have from there on.

    A record is its length, a CRC, the event, another CRC.
    """
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.*")):
        data, start = path.read_bytes(), 0
        while start < len(data):
            (length,) = struct.unpack_from("<Q", data, start)
            event = Event.FromString(data[start + 12: start + 12 + length])
            if event.session_log.status == event.session_log.START and event.step:
                found = {tag: [row for row in rows if row[0] < event.step] for tag, rows in found.items()}
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
            start += 12 + length + 4
    return found
