"""podman, buildah and what they run, from Debian's packages, without installing anything.

The packages are downloaded by apt and unpacked into ``.containers/tools``. Images, volumes and
the state of containers are below ``.containers`` too, apart from those of a podman that the machine
may have. ``make clean-containers`` removes all of it. Needs root, apt, and Linux 5.11 or later.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT: Final = Path(__file__).parents[2]
FOLDER: Final = ROOT / ".containers"
BASE: Final = "docker.io/library/python:3.11-slim-bookworm"
"""What the Containerfiles say; here a Debian with Python, made by mmdebstrap."""
POSTGRES: Final = "docker.io/library/postgres:17"
"""What the compose file says; here Debian's PostgreSQL, see ``postgres.Containerfile``."""

_PACKAGES = (
    *("podman", "buildah", "runc", "conmon", "netavark", "aardvark-dns", "iptables"),
    *("catatonit", "mmdebstrap", "prometheus"),
)
_TOOLS = FOLDER / "tools"
_MADE = _TOOLS / ".made"
_LIBRARIES = (_TOOLS / "usr/lib/x86_64-linux-gnu", _TOOLS / "lib/x86_64-linux-gnu")
_BIN = ("usr/bin", "usr/sbin", "sbin", "bin")
_SUITE = "bookworm"
_PYTHON_BASE = "python3,python3-venv,ca-certificates"
_POSTGRES_BASE = "postgresql"

# No ulimits: raising them needs CAP_SYS_RESOURCE, which CI machines may not have.
# runc: crun refuses machines with both versions of cgroups. cgroupfs: there may be no systemd.
_CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=8192:8192"]
log_driver = "k8s-file"
init_path = "{tools}/usr/bin/catatonit"

[network]
network_backend = "netavark"
network_config_dir = "{folder}/networks"

[engine]
cgroup_manager = "cgroupfs"
conmon_env_vars = {conmon_env_vars}
conmon_path = ["{tools}/usr/bin/conmon"]
events_logger = "file"
helper_binaries_dir = ["{tools}/usr/lib/podman", "{tools}/usr/bin"]
image_default_format = "docker"
lock_type = "file"
runtime = "runc"
tmp_dir = "{folder}/run/libpod"
volume_path = "{folder}/volumes"

[engine.runtimes]
runc = ["{tools}/usr/sbin/runc", "{tools}/usr/bin/runc"]
"""
_STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "{folder}/run/storage"
"""
_NO_REGISTRY = 'unqualified-search-registries = []\nshort-name-mode = "disabled"\n'
_POLICY = {"default": [{"type": "insecureAcceptAnything"}]}


@dataclass(frozen=True)
class Podman:
    """Runs podman, buildah and podman-compose, with nothing of the machine's configuration."""

    environment: Mapping[str, str]

    def run(
        self,
        *words: str | Path,
        timeout: float = 300,
        check: bool = True,
        more: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> subprocess.CompletedProcess[str]:
        """What a program has printed; with ``check`` it must succeed."""
        # Files, not pipes: what stays behind in the background would keep a pipe open.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            done = subprocess.run(
                [str(word) for word in words],
                cwd=cwd,
                env={**self.environment, **(more or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                timeout=timeout,
                check=False,
            )
            out.seek(0)
            err.seek(0)
            said = subprocess.CompletedProcess(done.args, done.returncode, out.read(), err.read())
        if check and said.returncode:
            raise AssertionError(
                f"{words}: {said.returncode}\n{said.stdout[-3000:]}{said.stderr[-3000:]}"
            )
        return said

    def output(self, *words: str | Path, timeout: float = 300) -> str:
        return self.run(*words, timeout=timeout).stdout.strip()

    def build(self, containerfile: Path, name: str, *options: str, context: Path = ROOT) -> None:
        """An image from one of the Containerfiles, as ``docker build`` makes it.

        pip's configuration is mounted as the secret that they name, so that nothing of it is in the
        image. What it refers to on this machine is mounted too.
        """
        secret = FOLDER / "pip.conf"
        secret.write_text(pip_configuration())
        named = [word for word in secret.read_text().split() if word.startswith("/")]
        mounts = [
            f"--volume={path}:{path}:ro"
            for path in dict.fromkeys(["/etc/ssl/certs", *named])
            if Path(path).is_dir()
        ]
        words = ["--isolation=oci", "--format=docker", "--layers", "--network=host"]
        secrets = [f"--secret=id=pip,src={secret}"]
        self.run(
            *("buildah", "bud", *words, *secrets, *mounts, *options),
            *("-f", containerfile, "-t", name, context),
            timeout=1800,
        )

    def size(self, image: str) -> int:
        """Bytes of an image, with those of the image that it is made from."""
        return int(self.output("podman", "image", "inspect", "--format", "{{.Size}}", image))


def make_podman() -> Podman:
    """Unpack the programs if they are not there. Skips where they cannot run, fails in CI."""
    if os.geteuid() != 0 or platform.machine() != "x86_64" or not shutil.which("apt-get"):
        _missing("The tests of containers need root on Debian or Ubuntu, x86_64.")
    if not _MADE.is_file() or _MADE.read_text().split() != list(_PACKAGES):
        _unpack()
    environment = _environment()
    # When a container ends, its conmon starts podman, which may start the container again.
    variables = json.dumps([f"{name}={value}" for name, value in environment.items()])
    for name, text in {
        "containers.conf": _CONTAINERS_CONF,
        "storage.conf": _STORAGE_CONF,
        "registries.conf": _NO_REGISTRY,
    }.items():
        filled = text.format(folder=FOLDER, tools=_TOOLS, conmon_env_vars=variables)
        (FOLDER / name).write_text(filled)
    policy = FOLDER / "home/.config/containers/policy.json"
    policy.parent.mkdir(parents=True, exist_ok=True)
    policy.write_text(json.dumps(_POLICY))
    podman = Podman(environment)
    _import_base(podman, BASE, _PYTHON_BASE)
    return podman


def make_postgres(podman: Podman) -> None:
    """Debian's PostgreSQL, under the name of the official image and with its interface."""
    _import_base(podman, "localhost/debian-postgres", _POSTGRES_BASE)
    here = Path(__file__).parent
    file, base = here / "postgres.Containerfile", "--build-arg=BASE=localhost/debian-postgres"
    podman.build(file, POSTGRES, base, context=here)


def _environment() -> dict[str, str]:
    inherited = ("LANG", "TZ", "SSL_CERT_FILE")
    paths = [str(Path(sys.executable).parent), *(str(_TOOLS / each) for each in _BIN)]
    return {
        **{name: os.environ[name] for name in inherited if name in os.environ},
        "PATH": os.pathsep.join([*paths, os.environ["PATH"]]),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, _LIBRARIES)),
        "XTABLES_LIBDIR": str(_LIBRARIES[0] / "xtables"),
        "HOME": str(FOLDER / "home"),
        "CONTAINERS_CONF": str(FOLDER / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(FOLDER / "storage.conf"),
        "CONTAINERS_REGISTRIES_CONF": str(FOLDER / "registries.conf"),
        "BUILDAH_ISOLATION": "oci",
    }


def _unpack() -> None:
    """Whole or not at all: the stamp comes last."""
    shutil.rmtree(_TOOLS, ignore_errors=True)
    archives = FOLDER / "debs"
    (archives / "partial").mkdir(parents=True, exist_ok=True)
    # Those that the machine has already are not downloaded, and not needed.
    words = ["apt-get", "install", "--yes", "--download-only", "--no-install-recommends"]
    words += ["--option", f"Dir::Cache::archives={archives}", "--option", "Debug::NoLocking=1"]
    words += ["--option", "APT::Keep-Downloaded-Packages=true", "--reinstall", *_PACKAGES]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        _missing(f"apt cannot download podman (try `apt-get update`): {done.stderr[-500:]}")
    _TOOLS.mkdir(parents=True)
    for package in sorted(archives.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, _TOOLS], check=True)
    shutil.rmtree(archives)
    # The alternatives that Debian's installation would have made.
    for name in ("iptables", "iptables-save", "iptables-restore", "ip6tables"):
        link = _TOOLS / "usr/sbin" / name
        if not link.exists():
            link.symlink_to("xtables-nft-multi")
    _MADE.write_text("\n".join(_PACKAGES))


def _import_base(podman: Podman, name: str, packages: str) -> None:
    if podman.run("podman", "image", "exists", name, check=False).returncode == 0:
        return
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        archive = Path(folder) / "base.tar"
        podman.run(
            *("mmdebstrap", "--variant=minbase", f"--include={packages}", _SUITE, archive),
            timeout=600,
        )
        podman.run("podman", "import", archive, name, timeout=600)


def pip_configuration() -> str:
    """What pip is configured with here, from files and variables, as one file."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    options = {}
    for line in lines:
        name, _, value = line.partition("=")
        section, _, option = name.partition(".")
        if section in {"global", ":env:", "install"} and option:
            options[option.lstrip(".")] = value.strip("'")
    said = "".join(f"{name} = {_indented(value)}\n" for name, value in options.items())
    return f"[global]\n{said}"


def _indented(value: str) -> str:
    return value.replace("\\n", "\n").strip().replace("\n", "\n    ")


def _missing(message: str) -> None:
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


def main() -> None:
    """Remove everything that the tests of containers have left."""
    if _MADE.is_file():
        podman = Podman(_environment())
        podman.run("podman", "rm", "--all", "--force", "--time", "0")
        podman.run("podman", "system", "reset", "--force", check=False)
    shutil.rmtree(FOLDER, ignore_errors=True)


if __name__ == "__main__":
    main()
