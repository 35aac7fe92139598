"""What a device gives: a table from vendors' data sheets, which a file can extend. Imports no torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from maporl.config import validated
from maporl.config.safe_yaml import read_yaml_file
from maporl.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """One accelerator.

    Args:
        flops: dense bfloat16 operations per second.
        bandwidth: bytes per second that it reads of its own memory.
        memory: bytes of its own memory.
        link: bytes per second to another device of its machine, one way.
        network: bytes per second to a device of another machine, one way.

    Raises:
        ValueError: a number is not above 0.
    """

    flops: float
    bandwidth: float
    memory: float
    link: float
    network: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")


DEVICES = {
    "A100": Device(312e12, 2.04e12, 80e9, 300e9, 25e9),
    "H100": Device(989e12, 3.35e12, 80e9, 450e9, 50e9),
    "H200": Device(989e12, 4.8e12, 141e9, 450e9, 50e9),
    "B200": Device(2250e12, 8e12, 180e9, 900e9, 50e9),
    "L40S": Device(362e12, 0.864e12, 48e9, 32e9, 25e9),
}


@dataclass(frozen=True)
class Cluster:
    """``machines`` machines, each with ``each`` devices."""

    machines: int
    each: int
    name: str
    device: Device

    @property
    def devices(self) -> int:
        """Return the number of devices of all machines."""
        return self.machines * self.each


def read_cluster(text: str, file: Path | None = None) -> Cluster:
    """Read ``2x8xH100`` or ``8xH200``: machines, devices of each, and the device's name in the table.

    ``file`` is a YAML file with further devices: ``{NAME: {flops: 1.0e+15, bandwidth: 3.0e+12, memory: 8.0e+10, link:
    4.5e+11, network: 5.0e+10}}``.

    Raises:
        ConfigError: ``text`` has another form, or names an unknown device, or the file is not such a table.
    """
    devices = DEVICES | ({} if file is None else _read_devices(file))
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z].+)", text)
    if match is None or "0" in (match[1], match[2]):
        raise ConfigError(
            f"--cluster: expected MACHINESxDEVICESxNAME, such as 2x8xH100, or 8xH200 for one machine, got {text!r:.60}"
        )
    if match[3] not in devices:
        raise ConfigError(
            f"--cluster: unknown device {match[3]!r:.60}; known: {', '.join(devices)}. Add others by --devices FILE, "
            "as {NAME: {flops: .., bandwidth: .., memory: .., link: .., network: ..}}"
        )
    return Cluster(int(match[1] or 1), int(match[2]), match[3], devices[match[3]])


def _read_devices(file: Path) -> dict[str, Device]:
    values = read_yaml_file(file)
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: expected devices by name, got {values!r:.80}")
    return {str(name): validated(Device, entry, f"{file}: {name}") for name, entry in values.items()}
