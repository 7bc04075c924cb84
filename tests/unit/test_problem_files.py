"""Problem files: every format in, every mistake reported by its line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.core.problem import Problem
from tilewise.errors import FileError, InputError
from tilewise.ops.conv.problem import ConvProblem
from tilewise.ops.gemm.problem import GemmProblem
from tilewise.problems.files import read_problems, write_problems
from tilewise.problems.rows import problem_from_words

LAYER = {"N": 8, "C": 64, "K": 128, "Hi": 56, "Wi": 56, "Y": 3, "X": 3, "pad_h": 1, "pad_w": 1}
LAYER_PROBLEM = ConvProblem(n=8, c=64, k=128, h=56, w=56, y=3, x=3, pad_h=1, pad_w=1)


def written(folder: Path, text: str | bytes, name: str = "problems.txt") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def sizes(problems: list[Problem]) -> list[tuple[int, int, int]]:
    assert all(isinstance(p, GemmProblem) for p in problems)
    return [(p.gemm.m, p.gemm.n, p.gemm.k) for p in problems]


class TestCsv:
    def test_keys_defaults_and_labels(self, tmp_path: Path) -> None:
        path = written(tmp_path, "M,N,K,network\n128,1536,7168,deepseek\n1,2,3,\n")
        found = read_problems(path, "gemm", dtype="bf16")
        assert found.problems == [
            GemmProblem(m=128, n=1536, k=7168, dtype="bf16"),
            GemmProblem(m=1, n=2, k=3, dtype="bf16"),
        ]
        assert found.labels == [{"network": "deepseek"}, {}]
        assert not found.bad_lines

    def test_bad_lines_by_number_and_good_ones_kept(self, tmp_path: Path) -> None:
        text = "# shapes\nM,N,K\n1,2,3\n\n4,five,6\n-1,2,3\n7,8\n7,nan,9\n1e3,2.0,3\n7,8,9.5\n"
        found = read_problems(written(tmp_path, text), "gemm")
        assert sizes(found.problems) == [(1, 2, 3), (1000, 2, 3)]
        assert [b.number for b in found.bad_lines] == [5, 6, 7, 8, 10]
        reasons = [b.reason for b in found.bad_lines]
        assert "'five'" in reasons[0]
        assert "-1" in reasons[1]
        assert "2 fields" in reasons[2]
        assert "nan" in reasons[3]
        assert "9.5" in reasons[4]
        assert found.bad_lines[0].text == "4,five,6"

    @pytest.mark.parametrize("separator", [",", ";", "\t", " , "])
    def test_byte_order_mark_line_ends_and_separators(self, tmp_path: Path, separator: str) -> None:
        lines = [separator.join(row) for row in (("m", "n", "k"), ("1", "2", "3"), ("4", "5", "6"))]
        for ending, encoding in (("\r\n", "utf-8-sig"), ("\r", "utf-8"), ("\n", "utf-16")):
            path = written(tmp_path, ending.join(lines).encode(encoding))
            assert sizes(read_problems(path, "gemm").problems) == [(1, 2, 3), (4, 5, 6)]

    @pytest.mark.parametrize("bad", ['4,"5,6', '4,5,"6', '"4,5,6'])
    def test_a_stray_quote_costs_its_own_line(self, tmp_path: Path, bad: str) -> None:
        text = f'M,N,K\n1,2,3\n{bad}\n7,"8",9\n10,11,12"\n13,14,15\n'
        found = read_problems(written(tmp_path, text), "gemm")
        assert sizes(found.problems) == [(1, 2, 3), (7, 8, 9), (13, 14, 15)]
        assert [b.number for b in found.bad_lines] == [3, 5]
        assert "a quote is not closed" in found.bad_lines[0].reason

    def test_a_header_with_a_stray_quote_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match="header, line 2"):
            read_problems(written(tmp_path, '# sizes\nM,N,"K\n1,2,3\n'), "gemm")

    def test_labels_of_several_lines_are_written_on_one(self, tmp_path: Path) -> None:
        path = tmp_path / "problems.csv"
        write_problems(path, [GemmProblem(m=1, n=2, k=3)], [{"network": "a\nb"}])
        assert read_problems(path, "gemm").labels == [{"network": "a b"}]

    def test_only_the_line_with_foreign_bytes_is_bad(self, tmp_path: Path) -> None:
        path = written(tmp_path, b"M,N,K,layer\n1,2,3,a\n1,2,3,caf\xe9\n4,5,6,b\n")
        found = read_problems(path, "gemm")
        assert sizes(found.problems) == [(1, 2, 3), (4, 5, 6)]
        assert [(b.number, b.reason) for b in found.bad_lines] == [(3, "it is not UTF-8 text")]
        found.bad_lines[0].text.encode()  # printable

    def test_huge_numbers(self, tmp_path: Path) -> None:
        path = written(tmp_path, f"M,N,K\n{10**30},1,1\n{'9' * 5000},1,1\n{2**62},1,1\n1e400,1,1\n")
        found = read_problems(path, "gemm")
        assert sizes(found.problems) == [(2**62, 1, 1)]
        assert [b.number for b in found.bad_lines] == [2, 3, 5]
        assert all("63 bits" in b.reason for b in found.bad_lines)

    def test_conv_two_and_three_dimensions(self, tmp_path: Path) -> None:
        head = "N,C,K,G,Di,Hi,Wi,Z,Y,X,pad_d,pad_h,pad_w"
        path = written(tmp_path, f"{head}\n8,64,128,1,,56,56,,3,3,,1,1\n1,8,8,,4,9,9,3,3,3,1,1,1\n")
        found = read_problems(path, "conv_bwd_data")
        assert [(p.op, p.ndim) for p in found.problems] == [
            ("conv_bwd_data", 2),
            ("conv_bwd_data", 3),
        ]

    def test_an_empty_height_is_not_taken_for_one(self, tmp_path: Path) -> None:
        path = written(tmp_path, "N,C,K,Hi,Wi,Y,X\n1,8,8,,16,1,1\n1,8,8,16,16,1,1\n")
        found = read_problems(path, "conv_fwd")
        assert len(found) == 1
        assert "Hi is empty" in found.bad_lines[0].reason

    def test_header_without_the_sizes(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match=r"columns M, N; gemm problems need K"):
            read_problems(written(tmp_path, "M,N\n1,2\n"), "gemm")
        with pytest.raises(FileError, match="column M more than once"):
            read_problems(written(tmp_path, "M,M,N,K\n1,1,2,3\n"), "gemm")

    def test_a_size_under_two_names(self, tmp_path: Path) -> None:
        path = written(tmp_path, "N,batch,C,K,Hi,Wi,Y,X\n1,2,8,8,4,4,1,1\n2,2,8,8,4,4,1,1\n")
        found = read_problems(path, "conv_fwd")
        assert [p.to_dict()["N"] for p in found.problems] == [2]
        assert "N is 1 and again, by batch, 2" in found.bad_lines[0].reason


class TestJson:
    def test_list(self, tmp_path: Path) -> None:
        rows = [{"layer": "conv1", **LAYER}, {**LAYER, "Hi": 28, "stride": 2}]
        found = read_problems(written(tmp_path, json.dumps(rows, indent=1)), "conv_fwd")
        assert found.problems[0] == LAYER_PROBLEM
        assert found.labels == [{"layer": "conv1"}, {}]
        second = found.problems[1]
        assert isinstance(second, ConvProblem)
        assert (second.stride_h, second.stride_w) == (2, 2)

    def test_broken_objects_in_a_list(self, tmp_path: Path) -> None:
        text = '[\n{"M":1,"N":2,"K":3},\n{"M":1,"N":,"K":3},\n7,\n{"M":NaN,"N":2,"K":3},\n'
        text += '{"M":4,"N":5,\n"K":6},\n{"M":7,"N":'
        found = read_problems(written(tmp_path, text), "gemm")
        assert sizes(found.problems) == [(1, 2, 3), (4, 5, 6)]
        assert [b.number for b in found.bad_lines] == [3, 4, 5, 8, 8]
        assert "not JSON" in found.bad_lines[0].reason
        assert "a number, not an object" in found.bad_lines[1].reason
        assert "not closed" in found.bad_lines[4].reason

    def test_lines(self, tmp_path: Path) -> None:
        text = '{"M":1,"N":2,"K":3,"count":5}\n\n# note\n{"M":1,\n[1]\n{"M":4,"N":5,"K":"6"}\n'
        found = read_problems(written(tmp_path, text), "gemm")
        assert sizes(found.problems) == [(1, 2, 3), (4, 5, 6)]
        assert found.labels[0] == {"count": 5}
        assert [b.number for b in found.bad_lines] == [4, 5]

    @pytest.mark.parametrize("indent", [None, 2])
    def test_a_list_inside_an_object(self, tmp_path: Path, indent: int | None) -> None:
        value = {"seed": 1, "problems": [{"M": 1, "N": 2, "K": 3}, {"M": 4, "N": 5, "K": 6}]}
        path = written(tmp_path, json.dumps(value, indent=indent))
        assert sizes(read_problems(path, "gemm").problems) == [(1, 2, 3), (4, 5, 6)]

    def test_one_object_over_several_lines(self, tmp_path: Path) -> None:
        path = written(tmp_path, json.dumps({"M": 1, "N": 2, "K": 3}, indent=2))
        assert sizes(read_problems(path, "gemm").problems) == [(1, 2, 3)]

    def test_nesting_does_not_exhaust_the_stack(self, tmp_path: Path) -> None:
        text = '{"M":1,"N":2,"K":3}\n' + '{"M":' * 100_000 + "\n"
        assert len(read_problems(written(tmp_path, text), "gemm").bad_lines) == 1


class TestMiopenDriver:
    def test_two_dimensions(self, tmp_path: Path) -> None:
        command = "-n 16 -c 256 -H 28 -W 28 -k 128 -y 3 -x 3 -p 1 -q 1 -u 1 -v 1 -l 1 -j 1"
        text = f"./bin/MIOpenDriver convbfp16 {command} -m conv -g 1 -F 1 -t 1\n"
        text += (
            f"MIOpen(HIP): Command [LogCmdConvolution] ./bin/MIOpenDriver convfp16 {command} -F 1\n"
        )
        found = read_problems(written(tmp_path, text), "conv_fwd")
        wanted = ConvProblem(
            n=16, c=256, k=128, h=28, w=28, y=3, x=3, pad_h=1, pad_w=1, dtype="bf16"
        )
        assert found.problems[0] == wanted
        assert found.problems[1].dtype == "fp16"

    def test_every_direction(self, tmp_path: Path) -> None:
        text = "\n".join(f"MIOpenDriver conv -n 1 -c 8 -k 8 -F {mask}" for mask in (0, 1, 2, 4, 6))
        path = written(tmp_path, text)
        ops = ["conv_fwd", "conv_bwd_data", "conv_bwd_weight"]
        assert [p.op for p in read_problems(path).problems] == [*ops, *ops, *ops[1:]]
        forward = read_problems(path, "conv_fwd")
        assert len(forward) == 2
        assert [b.number for b in forward.bad_lines] == [3, 4, 5]
        assert "conv_bwd_data" in forward.bad_lines[0].reason

    def test_three_dimensions_short_and_long(self, tmp_path: Path) -> None:
        short = "-_ 3 -n 2 -c 8 -k 16 -! 5 -H 6 -W 7 -@ 3 -y 1 -x 2 -# 2 -u 1 -v 3 -$ 1 -^ 2 -g 2"
        long = (
            "--spatial_dim 3 --batchsize 2 --in_channels 8 --out_channels 16 --in_d 5 --in_h=6 "
            "--in_w 7 --fil_d 3 --fil_h 1 --fil_w 2 --conv_stride_d 2 --conv_stride_h 1 "
            "--conv_stride_w 3 --pad_d 1 --dilation_d 2 --group_count 2"
        )
        path = written(tmp_path, f"MIOpenDriver conv {short} -F 1\nMIOpenDriver conv {long} -F 4\n")
        one, two = read_problems(path).problems
        wanted = {
            "n": 2, "c": 8, "k": 16, "g": 2, "d": 5, "h": 6, "w": 7, "z": 3, "y": 1, "x": 2,
            "stride_d": 2, "stride_w": 3, "pad_d": 1, "dilation_d": 2,
        }  # fmt: skip
        assert one == ConvProblem(**wanted)
        assert two == ConvProblem(direction="bwd_weight", **wanted)

    def test_layout_and_padding_modes(self, tmp_path: Path) -> None:
        text = "MIOpenDriver conv -n 1 -c 8 -k 8 -y 3 -x 3 -F 1 -z same -I NHWC\n"
        text += "MIOpenDriver conv -n 1 -c 8 -k 8 -y 3 -x 3 -F 1 -p 1 -z valid -I NCHW\n"
        same, valid = read_problems(written(tmp_path, text)).problems
        assert (same.to_dict()["pad_h"], same.to_dict()["layout"]) == (1, "nhwc")
        assert (valid.to_dict()["pad_h"], valid.to_dict()["layout"]) == (0, "nchw")

    def test_lines_of_a_log(self, tmp_path: Path) -> None:
        text = "[00:01] starting\n[00:02] ./bin/MIOpenDriver conv -n 1 -c 8 -k 8 -F 1\n"
        found = read_problems(written(tmp_path, text), "conv_fwd")
        assert len(found) == 1
        assert [b.number for b in found.bad_lines] == [1]

    def test_gemm(self, tmp_path: Path) -> None:
        text = "./bin/MIOpenDriver gemmfp16 -m 64 -n 128 -k 32 -b 4 --transB 1\n"
        assert read_problems(written(tmp_path, text), "gemm").problems == [
            GemmProblem(m=64, n=128, k=32, batch=4, dtype="fp16", layout="rcr")
        ]

    def test_mistakes(self, tmp_path: Path) -> None:
        text = "MIOpenDriver conv -n 1 -c 8 -k 8 -F 1\nMIOpenDriver convfp4 -n 1\nhello\n"
        text += "MIOpenDriver conv -n x -F 1\nMIOpenDriver conv -n\nMIOpenDriver conv -m trans\n"
        text += "MIOpenDriver conv -c 3 -k 3 -g 2 -F 1\nMIOpenDriver conv -F 9\n"
        found = read_problems(written(tmp_path, text), "conv_fwd")
        assert len(found) == 1
        assert [b.number for b in found.bad_lines] == [2, 3, 4, 5, 6, 7, 8]


def test_parquet(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    problem = GemmProblem(m=1, n=2, k=3)
    texts = [json.dumps(problem.to_dict()), "rubbish"]
    path = tmp_path / "oof.parquet"
    pq.write_table(pa.table({"problem": texts, "efficiency": [0.5, 0.6]}), path)
    found = read_problems(path, "gemm")
    assert (found.problems, found.labels) == ([problem], [{"efficiency": 0.5}])
    assert [b.number for b in found.bad_lines] == [2]
    path.write_bytes(b"PAR1 no more")
    with pytest.raises(FileError, match="not a Parquet file"):
        read_problems(path, "gemm")


class TestRefused:
    def test_no_file_to_read(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match="does not exist"):
            read_problems(tmp_path / "none.csv", "gemm")
        with pytest.raises(FileError, match="is a folder"):
            read_problems(tmp_path, "gemm")

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            (b"", "empty"),
            (b"\n \n", "empty"),
            (b"M,N,K\n", "empty"),
            (b"[]", "empty"),
            (b"M,N,K\na,b,c\nd,e,f\n", "line 2: .* line 3"),
            (b'{"M": 1}\n', "N, K missing; gemm needs at least M, N, K"),
            (b"\x00\x01\x02\x03", "binary"),
            (b"\x89PNG\r\n\x1a\n\x00\x00", "binary"),
        ],
    )
    def test_without_a_problem(self, tmp_path: Path, content: bytes, why: str) -> None:
        with pytest.raises(FileError, match=why):
            read_problems(written(tmp_path, content), "gemm")

    def test_other_op(self, tmp_path: Path) -> None:
        path = tmp_path / "gemms.json"
        write_problems(path, [GemmProblem(m=1, n=2, k=3)])
        with pytest.raises(FileError, match="it is a gemm problem; conv_fwd was asked for"):
            read_problems(path, "conv_fwd")
        with pytest.raises(InputError, match="'convolve' is unknown"):
            read_problems(path, "convolve")
        with pytest.raises(InputError, match="gemm problems have no flavour"):
            read_problems(path, "gemm", flavour="sweet")

    def test_no_op_anywhere(self, tmp_path: Path) -> None:
        with pytest.raises(FileError, match="no op is given"):
            read_problems(written(tmp_path, "M,N,K\n1,2,3\n"))


gemms = st.builds(
    GemmProblem,
    m=st.integers(0, 2**40),
    n=st.integers(0, 2**40),
    k=st.integers(0, 2**40),
    batch=st.integers(1, 99),
    dtype=st.sampled_from(["fp32", "bf16", "fp8", "int8"]),
    layout=st.sampled_from(["rcr", "rrr", "crr", "ccr"]),
)
convs = st.builds(
    lambda groups, c, k, **rest: ConvProblem(g=groups, c=c * groups, k=k * groups, **rest),
    groups=st.integers(1, 9),
    direction=st.sampled_from(["fwd", "bwd_data", "bwd_weight"]),
    n=st.integers(0, 300),
    c=st.integers(1, 99),
    k=st.integers(1, 99),
    d=st.integers(7, 99),
    h=st.integers(7, 99),
    w=st.integers(7, 99),
    z=st.integers(1, 3),
    y=st.integers(1, 3),
    x=st.integers(1, 3),
    stride_h=st.integers(1, 3),
    pad_w=st.integers(0, 3),
    dilation_d=st.integers(1, 3),
    dtype=st.sampled_from(["fp32", "bf16"]),
    layout=st.sampled_from(["nhwc", "nchw"]),
)
label_text = st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=9)


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl"])
@settings(max_examples=40, deadline=None)
@given(problems=st.lists(st.one_of(gemms, convs), min_size=1, max_size=9), label=label_text)
def test_what_is_written_reads_back(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, problems: list[Problem], label: str
) -> None:
    path = tmp_path_factory.mktemp("set") / f"problems{suffix}"
    write_problems(path, problems, [{"layer": label}] * len(problems))
    found = read_problems(path)
    assert found.problems == problems
    assert not found.bad_lines
    assert [each.get("layer", "").strip() for each in found.labels] == [label.strip()] * len(
        problems
    )


def test_writing_fails_clearly(tmp_path: Path) -> None:
    problems = [GemmProblem(m=1, n=2, k=3)]
    with pytest.raises(FileError, match=r"use \.csv, \.json, \.jsonl"):
        write_problems(tmp_path / "problems.xml", problems)
    with pytest.raises(FileError, match="cannot be written"):
        write_problems(tmp_path / "absent" / "problems.csv", problems)
    assert list(tmp_path.iterdir()) == []


def test_links_and_pipes_are_written_not_replaced(tmp_path: Path) -> None:
    problems = [GemmProblem(m=1, n=2, k=3)]
    real, link = tmp_path / "real.csv", tmp_path / "link.csv"
    real.write_text("old")
    link.symlink_to(real)
    write_problems(link, problems)
    assert link.is_symlink()
    assert read_problems(real).problems == problems
    pipe = tmp_path / "pipe.csv"
    os.mkfifo(pipe)
    found: list[str] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_text()), daemon=True)
    reader.start()
    write_problems(pipe, problems)
    reader.join(timeout=60)
    assert found == [real.read_text()]
    assert pipe.is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"real.csv", "link.csv", "pipe.csv"}
    loop = tmp_path / "loop.csv"
    loop.symlink_to(loop)
    for bad in (loop, real / "x.csv", tmp_path / f"{'n' * 300}.csv"):
        with pytest.raises(FileError, match="cannot be written"):
            write_problems(bad, problems)


def test_standard_output_in_a_file_is_added_to(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("before\n")
    code = "from pathlib import Path; from tilewise.problems.lines import replace_text as r; "
    code += "print('begins', flush=True); r(Path('/dev/stdout'), 'text\\n'); print('ends')"
    with log.open("a") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert log.read_text() == "before\nbegins\ntext\nends\n"


def test_words() -> None:
    problem = problem_from_words(["M=128", "N=1536", "k=7168"], "gemm", dtype="bf16")
    assert problem == GemmProblem(m=128, n=1536, k=7168, dtype="bf16")
    for words, why in (
        (["M=1", "N=2"], "K missing"),
        (["M=1", "N=2", "K"], "'K' is not KEY=VALUE"),
        (["M=1", "N=2", "K=x"], "K is 'x'"),
        (["M=1", "N=2", "K=3", "Q=4"], "gemm has no Q"),
        (["M=1", "M=2", "K=3"], "M is given twice"),
        (["M=1", " M =2", "K=3"], "M is given twice"),
    ):
        with pytest.raises(InputError, match=why):
            problem_from_words(words, "gemm")
