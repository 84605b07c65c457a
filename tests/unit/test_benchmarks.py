import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

BARS = {
    "stall_vs_dcp_async": 0.02,
    "step_overhead": 0.015,
    "step_overhead_vs_dcp_async": 0.2,
    "persist_vs_limit": 1.10,
    "persist_vs_raw": 0.6,
    "persist_vs_torch_save": 0.6,
    "persist_vs_dcp": 0.6,
    "persist_vs_safetensors": 0.6,
    "persist_tmpfs_vs_best": 1.0,
    "restore_vs_limit": 1.10,
    "restore_vs_torch_load": 0.8,
    "restore_vs_dcp": 0.8,
    "restore_vs_read_warm": 1.35,
    "verify_vs_limit": 1.10,
    "peak_memory": 1.1,
}


def test_the_checkpoint_benchmark_measures_every_figure(tmp_path):
    argv = [sys.executable, BENCHMARKS / "checkpoint.py", "--quick", "--json", "--dir", tmp_path]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["schema_version"] == 1
    assert answer["machine"].keys() >= {"cores", "kernel", "file_system"}
    figures = {one["name"]: one for one in answer["figures"]}
    assert {name: figures[name]["bar"] for name in BARS} == BARS
    for one in figures.values():
        assert len(one["ours"]) == len(one["peer"]) == answer["repeats"]
        assert one["value"] >= 0
    assert list(tmp_path.iterdir()) == []


def test_the_timeline_benchmark_measures_every_figure():
    argv = [sys.executable, BENCHMARKS / "timeline.py", "--rows", "2000", "--repeat", "1"]
    done = subprocess.run(
        [*argv, "--no-peers", "--json"], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["rows"] == 2000
    ratios = ("vs_read_csv", "vs_read_csv_cpu", "us_per_row", "us_per_row_at_10000")
    assert all(answer[name] > 0 for name in ratios)
    assert answer["peak_memory_vs_file"] >= 0


def test_the_gpu_benchmark_says_when_there_is_no_gpu():
    code = (
        "import runpy, sys, torch; torch.cuda.is_available = lambda: False;"
        "sys.path.insert(0, sys.argv[1]); sys.argv[1:] = [];"
        f"runpy.run_path({str(BENCHMARKS / 'gpu_checkpoint.py')!r}, run_name='__main__')"
    )
    argv = [sys.executable, "-c", code, str(BENCHMARKS)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "no GPU" in done.stderr


def test_the_resiliency_benchmark_measures_ours_and_lists_what_it_leaves_out(tmp_path):
    argv = [sys.executable, BENCHMARKS / "resiliency.py", "--quick", "--no-peers", "--json"]
    done = subprocess.run(
        [*argv, "--dir", tmp_path], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["schema_version"] == 1
    assert answer["machine"].keys() >= {"cores", "kernel", "file_system"}
    assert answer["figures"] == []
    ours, *peers = answer["engines"]
    assert (ours["name"], ours["runs"]) == ("slurmspot", True)
    for name in ("stall_s", "until_on_disk_s"):
        assert len(ours[name]["samples"]) == answer["repeats"]
        assert ours[name]["median"] > 0
    assert {one["package"] for one in peers} == {"lm-resiliency", "nvidia-resiliency-ext"}
    for one in peers:
        assert (one["runs"], one["why"]) == (False, "left out: --no-peers")
    assert list(tmp_path.iterdir()) == []
