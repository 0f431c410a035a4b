"""Processes that hang, die and lie; and which GPU a worker sees."""

import sys
import textwrap
import threading
import time

import pytest

from anyfp8.device import find_device
from anyfp8.errors import DeviceError
from anyfp8.form import form_of
from anyfp8.problem import Scheme
from anyfp8.tools.tune import GpuWorker
from anyfp8.tools.tune_cells import cells_of, read_shapes
from anyfp8.tools.tune_child import Child, ChildFailed
from anyfp8.tools.tune_compile import COMMAND as COMPILE
from anyfp8.tools.tune_compile import Pool, launches, request_of
from anyfp8.tools.tune_devices import (
    chosen,
    from_json,
    named_ordinals,
    no_gpu,
    to_json,
    worker_environments,
)
from anyfp8.tools.tune_journal import Refusal

H200 = find_device("h200")

# answers requests as a measuring process does; what it does with one is the request's word
SCRIPT = textwrap.dedent(
    """
    import json, os, signal, subprocess, sys, time
    answers = os.fdopen(int(os.environ["ANYFP8_ANSWERS"]), "w")
    opened = 0
    for line in sys.stdin:
        asked = json.loads(line)
        what = asked.get("config", {}).get("what", asked["do"])
        answer = {"us": 5.0, "pid": os.getpid(), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
        if what == "hang":
            subprocess.Popen(["sleep", "60"])
            time.sleep(60)
        if what == "die":
            print("CUDA error: an illegal memory access was encountered", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGSEGV)
        if what == "exit":
            sys.exit(3)
        if what == "wrong":
            answer = {"kind": "wrong", "refused": "errs by 1.00e+00, allowed 3.91e-03"}
        if what == "lost":
            answer = {"kind": "crashed", "refused": "illegal memory access", "last": True}
        if what == "chatty":
            print("a library prints to stdout", flush=True)
        if what == "open":
            opened += 1
            answer = {"refused": {}, "opened": opened}
        answers.write(json.dumps(answer) + "\\n")
        answers.flush()
    """
)
COMMAND = (sys.executable, "-S", "-c", SCRIPT)


@pytest.fixture
def child():
    made = Child(COMMAND, {"CUDA_VISIBLE_DEVICES": "2"})
    yield made
    made.close()


@pytest.fixture
def worker():
    made = GpuWorker({"CUDA_VISIBLE_DEVICES": "GPU-5e3a"}, COMMAND, 16)
    yield made
    made.close()


def the_cell():
    shapes, _ = read_shapes(["512,1024"], Scheme("channel", "token", True))
    return cells_of(shapes, H200, [16])[0]


def test_one_line_in_one_line_out_and_prints_do_not_mix_in(child):
    first = child.call({"do": "time"}, 10)
    assert (first["us"], first["gpu"]) == (5.0, "2")
    assert child.call({"do": "chatty"}, 10)["pid"] == first["pid"]


def test_a_hang_is_killed_with_what_it_started_and_the_next_call_has_a_new_process(child):
    pid = child.call({"do": "time"}, 10)["pid"]
    start = time.monotonic()
    with pytest.raises(ChildFailed, match="no answer within 0 s") as failed:
        child.call({"do": "hang"}, 0.3)
    assert failed.value.kind == "hung"
    assert time.monotonic() - start < 5
    assert child.call({"do": "time"}, 10)["pid"] != pid


@pytest.mark.parametrize(
    ("what", "said"), [("die", "SIGSEGV and gave no answer .CUDA error"), ("exit", "exit status 3")]
)
def test_a_death_is_told_with_its_last_words(child, what, said):
    with pytest.raises(ChildFailed, match=said) as failed:
        child.call({"do": what}, 10)
    assert failed.value.kind == "crashed"
    assert child.call({"do": "time"}, 10)["us"] == 5.0


def test_a_process_that_cannot_start_is_a_failure_not_a_hang():
    made = Child((sys.executable, "-S", "-c", "raise SystemExit('no such GPU')"))
    with pytest.raises(ChildFailed, match="no such GPU"):
        made.call({"do": "hello"}, 10)
    made.close()


def test_children_end_when_their_parent_is_gone():
    # what `answer` starts: a watch on the parent; its own process is the parent here
    from anyfp8.tools import tune_child

    ended = threading.Event()
    real = tune_child.os._exit
    tune_child.os._exit = lambda code: ended.set() or (_ for _ in ()).throw(SystemExit)
    try:
        with pytest.raises(SystemExit):
            tune_child._watch(parent=-1)
    finally:
        tune_child.os._exit = real
    assert ended.is_set()


def test_each_misfortune_of_a_candidate_is_a_refusal_and_the_worker_goes_on(worker):
    cell = the_cell()
    from anyfp8.tools import tune

    limit, tune.TIME_LIMIT_S = tune.TIME_LIMIT_S, 0.5
    try:
        found = {
            what: worker.time(cell, "triton_row", {"what": what}, 1)
            for what in ("fine", "hang", "wrong", "die", "lost", "fine again")
        }
    finally:
        tune.TIME_LIMIT_S = limit
    assert found["fine"] == found["fine again"] == 5.0
    kinds = {what: one.kind for what, one in found.items() if isinstance(one, Refusal)}
    assert kinds == {"hang": "hung", "wrong": "wrong", "die": "crashed", "lost": "crashed"}
    assert all(one.reason for one in found.values() if isinstance(one, Refusal))


def test_a_new_process_is_told_the_cell_again(worker):
    cell = the_cell()
    worker.open(cell)
    assert isinstance(worker.time(cell, "triton_row", {"what": "exit"}, 1), Refusal)
    assert worker.time(cell, "triton_row", {}, 1) == 5.0
    # asked by the second process: the first was opened once, so was the second
    assert worker._child.call({"do": "open"}, 10)["opened"] == 2


def tiles(*widths):
    made = {"block_m": 16, "block_k": 128, "num_warps": 4, "num_stages": 3}
    return [made | {"block_n": width} for width in widths]


def test_compilers_that_hang_or_die_refuse_their_candidate_only(tmp_path):
    pytest.importorskip("triton")
    # by its turn, as forms say nothing to a script
    script = SCRIPT.replace('"us": 5.0', '"refused": ""').replace(
        "asked = json.loads(line)",
        "asked = json.loads(line); turn = open(FILE).read(); open(FILE, 'w').write(turn[1:])",
    )
    turns = tmp_path / "turns"
    turns.write_text("fhdf")
    words = "{'f': 'fine', 'h': 'hang', 'd': 'die'}.get(turn[:1], 'fine')"
    script = script.replace('asked.get("config", {}).get("what", asked["do"])', words)
    script = script.replace("FILE", repr(str(turns)))
    pool = Pool(H200, 1, (sys.executable, "-S", "-c", script), 0.5)
    cell = the_cell()
    try:
        asked = tiles(16, 32, 64, 128)
        futures = [pool.submit(cell, "triton_row", tile) for tile in asked]
        found = [future.result(20) for future in futures]
        assert pool.submit(cell, "triton_row", asked[0]) is futures[0]
    finally:
        pool.close()
    assert found[0] == found[3] == ""
    assert "no answer within" in found[1]
    assert "SIGSEGV" in found[2]


def test_a_pool_that_is_closed_ends_at_once_whatever_its_compilers_do():
    pytest.importorskip("triton")
    script = SCRIPT.replace('asked.get("config", {}).get("what", asked["do"])', '"hang"')
    pool = Pool(H200, 3, (sys.executable, "-S", "-c", script), 60)
    futures = [pool.submit(the_cell(), "triton_row", tile) for tile in tiles(16, 32, 64, 128)]
    while sum(future.running() for future in futures) < 3:
        time.sleep(0.01)
    time.sleep(0.2)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 5
    assert futures[3].cancelled()
    assert all("SIGKILL" in future.result(5) for future in futures[:3])


def test_what_is_asked_for_compiles_before_what_may_be(tmp_path):
    pytest.importorskip("triton")
    log = tmp_path / "log"
    script = SCRIPT.replace('"us": 5.0', '"refused": ""').replace(
        "asked = json.loads(line)",
        f"asked = json.loads(line); open({str(log)!r}, 'a').write(asked['forms'] + '\\n'); "
        "time.sleep(0.05)",
    )
    script = script.replace('asked.get("config", {}).get("what", asked["do"])', '"fine"')
    pool = Pool(H200, 1, (sys.executable, "-S", "-c", script), 20)
    cell, asked = the_cell(), tiles(16, 32, 64, 128, 256)
    pool.prepare((cell, "triton_row", tile) for tile in asked)
    wanted = [pool.submit(cell, "triton_row", tile) for tile in asked]
    pool.prepare((cell, "triton_row", tile | {"num_stages": 4}) for tile in asked)
    late = pool.submit(cell, "triton_row", asked[0] | {"num_stages": 5})
    try:
        assert [future.result(20) for future in wanted] == [""] * 5
        assert late.result(20) == ""
        done = len(log.read_text().split())
        # the late one did not wait for the five that nobody asked for
        assert done <= 8
    finally:
        pool.close()
    # put twice, compiled once
    assert len(set(log.read_text().split())) == len(log.read_text().split())


def test_cells_that_differ_in_what_no_kernel_sees_share_a_compilation():
    pytest.importorskip("triton")
    pool = Pool(H200, 0)
    (tile,) = tiles(32)
    row = Scheme("channel", "token", True)
    some = [
        cells_of(read_shapes([shape], row)[0], H200, [m])[0]
        for shape, m in (("512,1024", 16), ("1024,2048", 16), ("512,1024", 32), ("512,1008", 16))
    ]
    futures = [pool.submit(cell, "triton_row", tile) for cell in some]
    pool.close()
    assert futures[0] is futures[1] is futures[2]
    # columns that the tile does not divide make another kernel
    assert futures[3] is not futures[0]


def test_a_candidate_that_cannot_be_launched_is_refused_at_once():
    pool = Pool(H200, 0)
    future = pool.submit(the_cell(), "triton_row", {"block_m": 17})
    assert "cannot be launched" in future.result(1)
    pool.close()


@pytest.mark.parametrize(
    ("environ", "count", "seen"),
    [
        ({}, 2, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "2"}, 1, ["2"]),
        ({"CUDA_VISIBLE_DEVICES": "3,1"}, 2, ["3", "1"]),
        ({"CUDA_VISIBLE_DEVICES": " 0 , 1 "}, 2, ["0", "1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c,GPU-1"}, 2, ["GPU-8932f937-d72c", "GPU-1"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-89/1/0"}, 1, ["MIG-GPU-89/1/0"]),
        ({"CUDA_VISIBLE_DEVICES": "MIG-c7384736-a75d"}, 1, ["MIG-c7384736-a75d"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0, []),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0, []),
        # torch sees fewer than are named: one of them is not there
        ({"CUDA_VISIBLE_DEVICES": "0,9"}, 1, ["0"]),
    ],
)
def test_every_form_of_cuda_visible_devices(environ, count, seen):
    found = worker_environments(environ, "cuda", count)
    assert found == [{"CUDA_VISIBLE_DEVICES": entry} for entry in seen]


@pytest.mark.parametrize(
    ("environ", "count", "seen"),
    [
        ({}, 2, ["0", "1"]),
        ({"HIP_VISIBLE_DEVICES": "2,3"}, 2, ["2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1, ["1"]),
        ({"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "2"}, 1, ["2"]),
        # counts within ROCR_VISIBLE_DEVICES, which stays as it is
        ({"ROCR_VISIBLE_DEVICES": "4,5"}, 2, ["0", "1"]),
        ({"HIP_VISIBLE_DEVICES": ""}, 0, []),
    ],
)
def test_every_form_on_rocm(environ, count, seen):
    found = worker_environments(environ, "hip", count)
    assert found == [{"HIP_VISIBLE_DEVICES": e, "CUDA_VISIBLE_DEVICES": e} for e in seen]


def test_no_runtime_no_worker():
    assert worker_environments({}, "none", 0) == []


def test_a_hidden_gpu_is_named_as_the_reason():
    error = no_gpu({"CUDA_VISIBLE_DEVICES": ""})
    assert "CUDA_VISIBLE_DEVICES=''" in error.got
    assert error.want
    assert "--dry-run" in error.hint


def test_the_device_option_picks_ordinals():
    three = [{"CUDA_VISIBLE_DEVICES": e} for e in ("4", "GPU-x", "6")]
    assert chosen(three, None) == chosen(three, "cuda") == three
    assert chosen(three, "cuda:1") == chosen(three, "1") == [three[1]]
    assert chosen(three, "cuda:2,0") == [three[2], three[0]]
    with pytest.raises(DeviceError, match="no such GPU"):
        chosen(three, "cuda:3")
    assert named_ordinals("cuda:0,1")
    assert not named_ordinals("h200")


@pytest.mark.parametrize("name", ["h200", "mi300x", "a100", "sm_75"])
def test_a_gpu_survives_its_way_from_the_worker(name):
    import json

    device = find_device(name)
    assert from_json(json.loads(json.dumps(to_json(device)))) == device


def test_a_compiling_process_fills_the_cache_and_refuses_what_does_not_fit(tmp_path):
    pytest.importorskip("triton")
    cell = the_cell()
    small = tiles(32)[0]
    big = small | {"block_m": 256, "block_n": 256, "num_warps": 8, "num_stages": 6}
    command = (*COMPILE, "compile")
    made = Child(command, {"TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""})
    try:
        for name, tile, said in (("h200", small, ""), ("l40s", big, "B of shared memory")):
            device = find_device(name)
            forms = tuple(map(form_of, launches(cell, "triton_row", tile, device)))
            answer = made.call(request_of(forms, device), 60)
            assert said in answer["refused"]
            assert bool(said) == bool(answer["refused"])
    finally:
        made.close()
    assert list(tmp_path.rglob("*.cubin"))
