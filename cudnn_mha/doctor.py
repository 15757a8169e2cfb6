"""What this machine offers to cuDNN attention, what stands in the way, and how to repair it.

`collect` looks, `findings` judges. Nothing but the standard library is needed to import this
module, nothing is written or downloaded, and a probe that fails becomes a value of the report.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from cudnn_mha import __version__, config, driver_stub
from cudnn_mha.config import MIN_CUDNN, MIN_FRONTEND, version_text
from cudnn_mha.store import Store

if TYPE_CHECKING:
    from cudnn_mha.backend import Status

MIN_SM = 80

_OUR_PREFIX = "TORCH_CUDNN_MHA_"
_SHOWN_PREFIXES = ("TORCH_CUDNN_", "CUDNN_")
_SHOWN_VARIABLES = (
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
)

_LIBRARY = re.compile(r"lib(cudnn|nvrtc|cublasLt)(?=[._-])[\w.-]*\.so[.\d]*")
_CUDNN_DISTRIBUTION = re.compile(r"nvidia-cudnn-(jit-)?cu(\d+)")

# The parts that plan, choose and compile attention; cuDNN opens them by name when first needed.
_CUDNN_PARTS = ("libcudnn_graph", "libcudnn_heuristic", "libcudnn_engines_runtime_compiled")

Level = Literal["ok", "warn", "fail"]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Finding:
    """One judgement.

    Attributes:
        level: ``fail`` where cuDNN attention cannot work or must not be trusted.
        subject: what was looked at, in a word or two.
        message: what was found.
        remedy: what to run or set; None where nothing needs doing.
    """

    level: Level
    subject: str
    message: str
    remedy: str | None = None


@dataclass(frozen=True)
class Versions:
    """Versions; None for what is missing or could not be asked.

    cuDNN's are numbers, 92400 for 9.24.0; ``cudnn_cuda`` is the CUDA it was built with.
    """

    python: str
    platform: str
    cudnn_mha: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    frontend: str | None = None
    torch_cudnn: int | None = None
    frontend_cudnn: int | None = None
    cudnn_cuda: str | None = None


@dataclass(frozen=True)
class Library:
    """A cuDNN, NVRTC or cuBLASLt file."""

    path: str
    loaded: bool = False

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def folder(self) -> str:
        return os.path.dirname(self.path)

    @property
    def family(self) -> str:
        """``cudnn``, ``nvrtc`` or ``cublasLt``."""
        match = _LIBRARY.fullmatch(self.name)
        return match[1] if match else ""


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees; ``sm`` is 90 for compute capability 9.0, ``memory`` is in bytes."""

    index: int
    name: str
    sm: int
    memory: int


@dataclass(frozen=True)
class Place:
    """A folder or file that the environment, or a default, sets for plans or recorded calls.

    Attributes:
        variable: the environment variable that sets it.
        path: where it is; None for a cache that is off.
        problem: why it cannot be used.
    """

    variable: str
    path: str | None
    problem: str | None = None


@dataclass(frozen=True)
class Facts:
    """What was found, unjudged.

    Attributes:
        versions: of everything that matters.
        libraries: every file found, on disk or loaded.
        unloadable: libraries that cuDNN's engines open by name and cannot, with the reason.
        distributions: versions of the installed packages that bring cuDNN.
        driver: the CUDA version that the NVIDIA driver supports; None without a driver.
        gpus: the GPUs that torch can use.
        variables: the environment variables that matter here.
        sdp_enabled: torch's own switch for cuDNN attention.
        drop_in: who serves torch's cuDNN attention in a process started like this one, and why.
        places: the cache on disk, folders of plans, and where calls are recorded.
        errors: the probes that failed, with the reason.
    """

    versions: Versions
    libraries: tuple[Library, ...] = ()
    unloadable: dict[str, str] = field(default_factory=dict)
    distributions: dict[str, str] = field(default_factory=dict)
    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    sdp_enabled: bool | None = None
    drop_in: Status | None = None
    places: tuple[Place, ...] = ()
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """The facts with the judgement on them."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether anything keeps cuDNN attention from working."""
        return any(finding.level == "fail" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {"failed": self.failed, **dataclasses.asdict(self)}


def collect(known_variables: Collection[str] = config.VARIABLES) -> Report:
    """Looks at this process and machine; loads torch, cuDNN and its frontend where they exist.

    Args:
        known_variables: the names of the package's environment variables.
    """
    facts = _facts()
    return Report(facts, tuple(findings(facts, known_variables)))


# ---------------------------------------------------------------------------------------- looking


class _Probes:
    """Runs probes and keeps what went wrong."""

    def __init__(self) -> None:
        self.errors: dict[str, str] = {}

    def __call__(self, name: str, probe: Callable[[], _T]) -> _T | None:
        try:
            return probe()
        except Exception as error:
            self.errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return None


def _facts() -> Facts:
    probe = _Probes()
    # torch first: cuDNN finds the CUDA libraries that torch has loaded.
    torch: Any = probe("torch", lambda: importlib.import_module("torch"))
    frontend: Any = probe("frontend", lambda: importlib.import_module("cudnn"))
    torch_cudnn = torch and probe("torch's cuDNN", lambda: torch.backends.cudnn.version())
    frontend_cudnn = frontend and probe("frontend's cuDNN", lambda: int(frontend.backend_version()))
    torch_cuda = torch and probe("torch's CUDA", lambda: torch.version.cuda)
    cudnn_cuda = probe("cuDNN's CUDA", _cuda_of_cudnn)
    unloadable = _unloadable_libraries(cudnn_cuda or torch_cuda)
    settings = probe("settings", config.reload)
    return Facts(
        versions=Versions(
            python=platform.python_version(),
            platform=platform.platform(),
            cudnn_mha=__version__,
            torch=torch and probe("torch", lambda: str(torch.__version__)),
            torch_cuda=torch_cuda,
            frontend=frontend and probe("frontend", lambda: str(frontend.__version__)),
            torch_cudnn=torch_cudnn,
            frontend_cudnn=frontend_cudnn,
            cudnn_cuda=cudnn_cuda,
        ),
        libraries=_libraries(probe),
        unloadable=unloadable,
        distributions=probe("distributions", _cudnn_distributions) or {},
        driver=probe("driver", _driver_cuda),
        gpus=(torch and probe("GPUs", lambda: _gpus(torch))) or (),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_SHOWN_PREFIXES) or name in _SHOWN_VARIABLES
        },
        sdp_enabled=torch
        and probe("torch's switch", lambda: torch.backends.cuda.cudnn_sdp_enabled()),
        drop_in=torch and probe("drop-in", _drop_in),
        places=(settings and probe("plans on disk", lambda: _places(settings))) or (),
        errors=probe.errors,
    )


def _drop_in() -> Status:
    # Needs a torch that works, which this module does not.
    from cudnn_mha import backend

    return backend.status()


def _places(settings: config.Settings) -> tuple[Place, ...]:
    cache = settings.cache_dir
    problem = None if cache is None else Store(cache).problem() or _unwritable(cache)
    found = [Place(config.CACHE_DIR, None if cache is None else str(cache), problem)]
    for folder in settings.plans:
        problem = Store(folder).problem()
        if problem is None and not os.path.isdir(folder):
            problem = f"{folder} does not exist"
        found.append(Place(config.PLANS, str(folder), problem))
    if settings.record is not None:
        path = Path(settings.record).expanduser()
        as_folder = settings.record.endswith(os.sep) or os.path.isdir(path)
        problem = _unwritable(path if as_folder else path.parent)
        if os.path.exists(path) and not as_folder:
            problem = None if os.access(path, os.W_OK) else f"{path} cannot be written by this user"
        found.append(Place(config.RECORD, str(path), problem))
    return tuple(found)


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written in a folder, be it there or still to be made."""
    folder = folder.absolute()
    there = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    why = None if os.access(there, os.W_OK | os.X_OK) else "cannot be written by this user"
    if not os.path.isdir(there):
        why = "is no folder"
    if why is None or there == folder:
        return why and f"{folder} {why}"
    return f"{folder} cannot be made: {there} {why}"


def _cudnn_distributions() -> dict[str, str]:
    found = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if _CUDNN_DISTRIBUTION.fullmatch(name):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _libraries(probe: _Probes) -> tuple[Library, ...]:
    loaded = probe("loaded libraries", _loaded_libraries) or set()
    on_disk = probe("libraries on disk", lambda: _libraries_on_disk(loaded)) or set()
    cached = probe("ldconfig", _linker_cache) or set()
    return tuple(Library(path, path in loaded) for path in sorted(loaded | on_disk | cached))


def _libraries_on_disk(loaded: Collection[str]) -> set[str]:
    """Libraries in the search path, beside the loaded ones and where packages put them."""
    folders = {*_search_path(os.environ.get("LD_LIBRARY_PATH")), os.path.join(sys.prefix, "lib")}
    folders |= {os.path.dirname(path) for path in loaded}
    for site in map(Path, filter(None, sys.path)):
        folders |= {str(site / "torch" / "lib"), *map(str, site.glob("nvidia/*/lib"))}
    return _real_libraries(str(f) for folder in folders for f in Path(folder).glob("lib*.so*"))


def _loaded_libraries() -> set[str]:
    # A line's sixth column is the path, which may hold spaces.
    rows = (line.split(None, 5) for line in Path("/proc/self/maps").read_text().splitlines())
    return _real_libraries(row[5] for row in rows if len(row) == 6)


def _linker_cache() -> set[str]:
    # Not on the path of an ordinary user everywhere.
    command = shutil.which("ldconfig") or "/sbin/ldconfig"
    listing = subprocess.run(
        [command, "-p"], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    return _real_libraries(re.findall(r"=> (.+)", listing))


def _search_path(variable: str | None) -> list[str]:
    return [folder for folder in (variable or "").split(":") if folder]


def _real_libraries(paths: Iterable[str]) -> set[str]:
    """Those of the paths that are libraries of interest, links resolved."""
    return {os.path.realpath(p) for p in paths if _LIBRARY.fullmatch(os.path.basename(p))}


def _cuda_of_cudnn() -> str | None:
    """The CUDA that the loaded cuDNN was built with."""
    for path in sorted(_loaded_libraries()):
        if os.path.basename(path).startswith("libcudnn.so"):
            version = ctypes.CDLL(path).cudnnGetCudartVersion
            version.restype = ctypes.c_size_t
            return _cuda_text(version())
    return None


def _unloadable_libraries(cuda: str | None) -> dict[str, str]:
    if cuda is None or sys.platform != "linux":
        return {}
    probe = _Probes()
    for family in ("nvrtc", "cublasLt"):
        name = f"lib{family}.so.{_major(cuda)}"
        probe(name, functools.partial(ctypes.CDLL, name))
    return probe.errors


def _driver_cuda() -> str | None:
    if not driver_stub.driver_present():
        return None
    version = ctypes.c_int()
    # Answers without initialising CUDA.
    status = ctypes.CDLL(driver_stub.SONAME).cuDriverGetVersion(ctypes.byref(version))
    if status:
        raise RuntimeError(f"cuDriverGetVersion answers {status}")
    return _cuda_text(version.value)


def _gpus(torch: Any) -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(
        Gpu(index, gpu.name, gpu.major * 10 + gpu.minor, gpu.total_memory)
        for index, gpu in enumerate(found)
    )


# ---------------------------------------------------------------------------------------- judging


def findings(facts: Facts, known_variables: Collection[str] = config.VARIABLES) -> list[Finding]:
    """Judges the facts: what is wrong with each subject, or that nothing is.

    Args:
        facts: what was found.
        known_variables: the names of the package's environment variables.
    """
    return [
        *_judge_torch(facts),
        *_judge_frontend(facts),
        *_judge_cudnn(facts),
        *_judge_libraries(facts),
        *_judge_gpus(facts),
        *_judge_switches(facts, known_variables),
        *_judge_drop_in(facts),
        *_judge_places(facts),
    ]


def _judge_torch(facts: Facts) -> Iterator[Finding]:
    versions = facts.versions
    if versions.torch is None:
        message = f"cannot be imported ({facts.errors.get('torch', 'not installed')})"
        yield Finding("fail", "torch", message, _install_torch(facts))
    elif versions.torch_cuda is None:
        yield Finding(
            "fail",
            "torch",
            f"{versions.torch} is built without CUDA, and cuDNN's engines need the cuBLASLt and "
            "NVRTC that a CUDA build brings",
            _install_torch(facts),
        )
    else:
        yield Finding("ok", "torch", f"{versions.torch}, CUDA {versions.torch_cuda}")


def _judge_frontend(facts: Facts) -> Iterator[Finding]:
    version = facts.versions.frontend
    needed = ".".join(map(str, MIN_FRONTEND))
    install = f"pip install -U 'nvidia-cudnn-frontend>={needed}'"
    if version is None:
        reason = facts.errors.get("frontend", "not installed")
        yield Finding("fail", "cuDNN frontend", f"cannot be imported ({reason})", install)
    elif tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < MIN_FRONTEND:
        message = f"{version} is too old, {needed} is needed"
        yield Finding("fail", "cuDNN frontend", message, install)
    else:
        yield Finding("ok", "cuDNN frontend", version)


def _judge_cudnn(facts: Facts) -> Iterator[Finding]:
    version = facts.versions.frontend_cudnn
    if version is not None:
        good = Finding("ok", "cuDNN", f"{version_text(version)}, CUDA {facts.versions.cudnn_cuda}")
        yield from list(_wrong_cudnn(facts, version)) or [good]
    elif facts.versions.frontend is not None:
        reason = facts.errors.get("frontend's cuDNN", "not found")
        yield Finding("fail", "cuDNN", f"cannot be loaded ({reason})", _install_cudnn(facts))


def _wrong_cudnn(facts: Facts, version: int) -> Iterator[Finding]:
    of_torch = facts.versions.torch_cudnn
    if version < MIN_CUDNN:
        needed = version_text(MIN_CUDNN)
        yield Finding(
            "fail",
            "cuDNN",
            f"{version_text(version)} is too old, {needed} is needed",
            _install_cudnn(facts, f">={needed}"),
        )
    if reason := facts.errors.get("torch's cuDNN"):
        yield Finding("fail", "cuDNN", f"torch refuses it ({reason})", _one_cudnn(facts))
    if of_torch is not None and of_torch != version:
        yield Finding(
            "fail",
            "cuDNN",
            f"the frontend uses {version_text(version)}, torch uses {version_text(of_torch)}",
            _one_cudnn(facts),
        )
    built_for, wanted = _major(facts.versions.cudnn_cuda), _major(facts.versions.torch_cuda)
    if built_for and wanted and built_for != wanted:
        message = f"is built for CUDA {built_for}, torch for CUDA {wanted}"
        yield Finding("fail", "cuDNN", message, _one_cudnn(facts))


def _judge_libraries(facts: Facts) -> Iterator[Finding]:
    troubles = [*_mixed_libraries(facts), *_missing_libraries(facts), *_stray_cudnn(facts)]
    used = _folders(facts, "cudnn", loaded=True)
    if used and not troubles:
        yield Finding("ok", "libraries", f"one cuDNN, from {used[0]}")
    yield from troubles


def _mixed_libraries(facts: Facts) -> Iterator[Finding]:
    matches = map(_CUDNN_DISTRIBUTION.fullmatch, facts.distributions)
    if len({match[2] for match in matches if match}) > 1:
        yield Finding(
            "fail",
            "libraries",
            f"{' and '.join(facts.distributions)} are for different versions of CUDA and may have "
            "overwritten each other's files",
            _install_cudnn(facts),
        )
    for family, repair in (
        ("cudnn", _one_cudnn),
        ("nvrtc", _one_cuda),
        ("cublasLt", _one_cuda),
    ):
        folders = _folders(facts, family, loaded=True)
        if len(folders) > 1:
            message = f"lib{family} is loaded from several directories: {', '.join(folders)}"
            yield Finding("fail", "libraries", message, repair(facts))


def _missing_libraries(facts: Facts) -> Iterator[Finding]:
    for name, reason in facts.unloadable.items():
        message = f"{name}, without which cuDNN cannot compile, cannot be loaded ({reason})"
        yield Finding("fail", "libraries", message, _install_torch(facts))
    for folder in _folders(facts, "cudnn", loaded=True):
        names = [library.name for library in facts.libraries if library.folder == folder]
        missing = [
            part for part in _CUDNN_PARTS if not any(name.startswith(part) for name in names)
        ]
        if missing:
            message = f"the cuDNN in {folder} lacks {' and '.join(missing)}"
            yield Finding("fail", "libraries", message, _one_cudnn(facts))


def _stray_cudnn(facts: Facts) -> Iterator[Finding]:
    used = _folders(facts, "cudnn", loaded=True)
    unused = [folder for folder in _folders(facts, "cudnn", loaded=False) if folder not in used]
    if used and unused:
        yield Finding(
            "warn",
            "libraries",
            f"another cuDNN lies unused in {', '.join(unused)}; cuDNN opens its parts by name, "
            "so the two may come to be mixed",
            _one_cudnn(facts),
        )


def _judge_gpus(facts: Facts) -> Iterator[Finding]:
    deviceless = "planning for described GPUs still works"
    cuda = facts.versions.torch_cuda or "12 or newer"
    if facts.driver is None:
        yield Finding(
            "warn",
            "driver",
            f"{facts.errors.get('driver', 'there is no NVIDIA driver')}; {deviceless}",
            f"to compute, install an NVIDIA driver for CUDA {cuda}; in a container pass --gpus all",
        )
        return
    yield Finding("ok", "driver", f"supports CUDA {facts.driver}")
    if not facts.gpus:
        reason = facts.errors.get("GPUs", "torch.cuda is not available")
        message = f"torch sees none ({reason}); {deviceless}"
        yield Finding("warn", "GPU", message, _show_gpu(facts))
    usable = any(gpu.sm >= MIN_SM for gpu in facts.gpus)
    for gpu in facts.gpus:
        text = f"{gpu.index}: {gpu.name}, sm_{gpu.sm}, {gpu.memory / 2**30:.0f} GiB"
        if gpu.sm >= MIN_SM:
            yield Finding("ok", "GPU", text)
        else:
            yield Finding(
                "warn" if usable else "fail",
                "GPU",
                f"{text}; cuDNN attention needs sm_{MIN_SM}",
                "use a GPU of the Ampere generation or newer (CUDA_VISIBLE_DEVICES chooses)",
            )


def _judge_switches(facts: Facts, known_variables: Collection[str]) -> Iterator[Finding]:
    good = Finding("ok", "switches", "nothing turns cuDNN attention off")
    yield from list(_wrong_switches(facts, known_variables)) or [good]


def _wrong_switches(facts: Facts, known_variables: Collection[str]) -> Iterator[Finding]:
    if "settings" in facts.errors:
        name = facts.errors["settings"].split()[1]
        yield Finding("fail", "switches", facts.errors["settings"], f"mend or unset {name}")
    if _is_on(facts, config.DISABLED):
        message = f"{config.DISABLED} keeps cuDNN out of every call"
        yield Finding("warn", "switches", message, f"unset {config.DISABLED}")
    if facts.sdp_enabled is False:
        yield Finding(
            "warn",
            "switches",
            "torch's own switch for cuDNN attention is off",
            "torch.backends.cuda.enable_cudnn_sdp(True)",
        )
    for name in facts.variables:
        if name.startswith(_OUR_PREFIX) and name not in known_variables:
            message = f"{name} means nothing; known are {', '.join(sorted(known_variables))}"
            yield Finding("warn", "switches", message, f"unset {name}")


def _judge_drop_in(facts: Facts) -> Iterator[Finding]:
    state = facts.drop_in
    if state is None:
        return
    served = f"torch's cuDNN attention is served by {state.provider}"
    text = f"{'on' if state.enabled else 'off'} ({state.why}): {served}"
    if state.provider not in ("cudnn_mha", "PyTorch", "nobody"):
        remedy = "cudnn_mha.enable(), after that package's import, takes its place"
        if state.enabled:
            remedy = "cudnn_mha.disable() and cudnn_mha.enable() again take its place"
        yield Finding("warn", "drop-in", f"{text}, another package", remedy)
    elif state.enabled:
        text += f"; cudnn_mha.disable(), or {config.ENABLED}=0 from the start, switches it off"
        yield Finding("ok", "drop-in", text)
    elif _is_on(facts, config.DISABLED):
        yield Finding("ok", "drop-in", text)
    elif _is_on(facts, config.ENABLED):
        message = f"off although {config.ENABLED} is set ({state.why}): {served}"
        yield Finding("warn", "drop-in", message, _load_drop_in(facts))
    else:
        text += f"; cudnn_mha.enable(), or {config.ENABLED}=1 from the start, switches it on"
        yield Finding("ok", "drop-in", text)


def _judge_places(facts: Facts) -> Iterator[Finding]:
    for place in facts.places:
        name, path = place.variable, place.path
        text, remedy = {
            config.CACHE_DIR: (
                f"compiled plans are kept in {path}",
                f"set {name} to a folder that you alone can write, or to off",
            ),
            config.PLANS: (
                f"plans compiled ahead of time are read from {path}",
                f"take it out of {name}, or fill a folder of your own with "
                f"`cudnn-mha compile --out {shlex.quote(path or '')}`",
            ),
            config.RECORD: (
                f"calls are recorded in {path}",
                f"set {name} to a file or folder that you can write, or unset it",
            ),
        }[name]
        if path is None:
            text = f"compiled plans are not kept: {name} is off"
        if place.problem is None:
            yield Finding("ok", "plans on disk", text)
        else:
            message = f"{name} is of no use: {place.problem}"
            yield Finding("warn", "plans on disk", message, remedy)


def _load_drop_in(facts: Facts) -> str:
    """How to get the drop-in where its variable is set and it is off."""
    if facts.variables.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return "unset TORCH_DEVICE_BACKEND_AUTOLOAD, which keeps torch from loading it"
    return "cudnn_mha.enable() switches it on, or says what stands in the way"


def _is_on(facts: Facts, name: str) -> bool:
    value = facts.variables.get(name, "").strip().lower()
    return value not in ("", "0", "false", "no", "off")


def _folders(facts: Facts, family: str, *, loaded: bool) -> list[str]:
    return sorted(
        {
            library.folder
            for library in facts.libraries
            if library.family == family and library.loaded == loaded
        }
    )


def _show_gpu(facts: Facts) -> str:
    """How to make a GPU visible where the driver is there and torch sees none."""
    visible, cuda = facts.variables.get("CUDA_VISIBLE_DEVICES"), facts.versions.torch_cuda
    if visible is not None:
        return f"unset CUDA_VISIBLE_DEVICES (now {visible!r})"
    if cuda and (_major(facts.driver) or 0) < (_major(cuda) or 0):
        return f"update the NVIDIA driver to one for CUDA {cuda} (it supports {facts.driver})"
    return "run nvidia-smi to see whether the driver finds a GPU; in a container pass --gpus all"


def _one_cudnn(facts: Facts) -> str:
    """How to get rid of every cuDNN but the one that goes with torch."""
    return _clear_search_path(facts) or _install_cudnn(facts)


def _one_cuda(facts: Facts) -> str:
    """How to get rid of every NVRTC or cuBLASLt but those that go with torch."""
    return _clear_search_path(facts) or _install_torch(facts)


def _clear_search_path(facts: Facts) -> str | None:
    ours = {library.folder for library in facts.libraries}
    search_path = _search_path(facts.variables.get("LD_LIBRARY_PATH"))
    intruders = [folder for folder in search_path if os.path.realpath(folder) in ours]
    return f"take {' and '.join(intruders)} out of LD_LIBRARY_PATH" if intruders else None


def _install_cudnn(facts: Facts, requirement: str = "") -> str:
    """The commands that leave exactly one cuDNN, the one for torch's CUDA."""
    wanted = f"nvidia-cudnn-cu{_major(facts.versions.torch_cuda) or 13}"
    if not requirement and wanted in facts.distributions:
        requirement = f"=={facts.distributions[wanted]}"
    install = f"pip install --force-reinstall --no-deps '{wanted}{requirement}'"
    # Uninstalling one takes files of the other away, so the wanted one comes last and anew.
    others = [name for name in facts.distributions if name != wanted]
    return f"pip uninstall -y {' '.join(others)} && {install}" if others else install


def _install_torch(facts: Facts) -> str:
    """The command that brings torch with all its CUDA libraries, anew where it is there.

    PyPI's build for Linux is the one with CUDA.
    """
    if facts.versions.torch is None:
        return "pip install torch"
    return f"pip install --force-reinstall torch=={facts.versions.torch.split('+')[0]}"


def _major(cuda: str | None) -> int | None:
    return int(cuda.split(".")[0]) if cuda else None


def _cuda_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
