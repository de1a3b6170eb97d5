"""ONNX files of any origin as torch modules, compared with onnxruntime; deployed, and refused."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import growprune as gp
from growprune.cli import main
from growprune.files import onnx_import

onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")
runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402


def thinned(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data[torch.rand_like(parameter) < 0.9] = 0
    return model.eval()


class Images(nn.Module):
    """Strides, groups, padding on one side, and a residual addition."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16, stride=2)
        self.second, self.last = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.hardswish(self.depthwise(nn.functional.pad(self.first(x), (0, 1, 0, 1))))
        y = nn.functional.max_pool2d(torch.relu(self.second(x)) + x, 2, ceil_mode=True)
        return self.last(y.mean((2, 3)))  # type: ignore[no-any-return]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(50, 32), nn.Parameter(torch.randn(9, 32))
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.head = nn.Linear(32, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places[torch.arange(tokens.shape[1])]
        return self.head(self.block(x)).log_softmax(-1)  # type: ignore[no-any-return]


NETWORKS: dict[str, tuple[Any, Tensor]] = {
    "images": (Images, torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(1))),
    "tokens": (Tokens, torch.arange(14).reshape(2, 7)),
}


def of_nodes(path: Path, nodes: list[Any], inputs: dict[str, Any], *, opset: int = 18, shape: Any = None) -> Path:
    """A file of some nodes. Arrays are stored numbers; shapes are inputs."""
    stored = [numpy_helper.from_array(x, name) for name, x in inputs.items() if isinstance(x, np.ndarray)]
    given = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, x)
        for name, x in inputs.items()
        if not isinstance(x, np.ndarray)
    ]
    out = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("y",)]
    graph = helper.make_graph(nodes, "graph", given, out, stored)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)], ir_version=9
    )
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


def in_onnxruntime(path: Path, *inputs: Tensor) -> list[Tensor]:
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    given = {one.name: x.numpy() for one, x in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.as_tensor(x) for x in session.run(None, given)]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_an_exported_file_computes_what_the_model_did_and_its_zeros_are_found(
    network: str, sparse: bool, tmp_path: Path
) -> None:
    make, x = NETWORKS[network]
    model, path = thinned(make()), tmp_path / "model.onnx"
    gp.export_onnx(model, path, (x,), sparse=sparse)
    again = gp.from_onnx(path)
    torch.testing.assert_close(again(x), model(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(again(x[:1]), model(x[:1]), rtol=0, atol=1e-5)
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    expected = sorted(int(layer.weight.count_nonzero()) for layer in layers)
    if network == "tokens":  # the product of q, k and v is a layer of torch's attention, not of its own
        expected = sorted([*expected, int(model.block.self_attn.in_proj_weight.count_nonzero())])  # type: ignore[union-attr, operator]
    assert sorted(int(layer.weight.count_nonzero()) for layer in again.layers.values()) == expected  # type: ignore[operator, union-attr]
    fast = gp.deploy(str(path), (x,), seconds=0)
    torch.testing.assert_close(fast(x), model(x), rtol=0, atol=1e-4)
    assert "sparse" in {row.choice for row in fast.table}
    assert not [one for one in fast.table.in_torch if "as a whole" in one]


FEW, MANY = [2, 3], [2, 4, 6, 6]
ONE_NODE: list[tuple[str, list[Any], dict[str, Any]]] = [
    *((kind, [FEW, FEW], {}) for kind in ("Add", "Sub", "Mul", "Div", "Min", "Max", "MatMul2", "PRelu")),
    *(
        (kind, [FEW], {})
        for kind in ("Abs", "Exp", "Erf", "Sin", "Cos", "Reciprocal", "Tanh", "Sigmoid", "Neg", "Relu")
    ),
    *((kind, [FEW], {}) for kind in ("Softplus", "HardSwish", "Identity", "LeakyRelu", "HardSigmoid", "Dropout")),
    *((kind, [FEW, np.array([1])], {"keepdims": keep}) for kind in ("ReduceMean", "ReduceMax") for keep in (0, 1)),
    *((kind, [FEW], {}) for kind in ("ReduceSum", "ReduceMin", "ReduceL2")),
    *((kind, [FEW], {"axis": 0}) for kind in ("Softmax", "LogSoftmax")),
    ("Pow", [FEW, np.array(2.0, np.float32)], {}),
    ("Clip", [FEW, np.array(-0.5, np.float32), np.array(0.5, np.float32)], {}),
    ("Reshape", [MANY, np.array([0, -1, 3])], {}),
    *(("Flatten", [MANY], {"axis": axis}) for axis in (0, 1, 2, -1)),
    ("Transpose", [FEW], {}),
    ("Transpose", [MANY], {"perm": [0, 2, 3, 1]}),
    ("Squeeze", [[2, 1, 3], np.array([1])], {}),
    ("Unsqueeze", [FEW, np.array([-1, 0])], {}),
    ("Concat", [FEW, FEW], {"axis": 1}),
    ("Expand", [[1, 3], np.array([4, 2, 1])], {}),
    ("Tile", [FEW, np.array([2, 1])], {}),
    ("Slice", [MANY, np.array([1, 5]), np.array([3, -7]), np.array([1, 3]), np.array([1, -2])], {}),
    ("Slice", [MANY, np.array([-3]), np.array([1000]), np.array([2])], {}),
    ("Gather", [MANY, np.array([[0, -1], [2, 1]])], {"axis": 1}),
    ("Gather", [MANY, np.array(-1)], {"axis": 2}),
    ("GatherElements", [FEW, np.array([[0, -1]])], {"axis": 1}),
    ("GatherND", [FEW, np.array([[0, 2], [1, 0]])], {}),
    *(("CumSum", [FEW, np.array(1)], {"exclusive": e, "reverse": r}) for e in (0, 1) for r in (0, 1)),
    ("Pad", [FEW, np.array([0, 1, 2, 0]), np.array(7.0, np.float32)], {}),
    ("Trilu", [[4, 4], np.array(1)], {"upper": 0}),
    ("MaxPool", [MANY], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]}),
    ("MaxPool", [MANY], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
    ("AveragePool", [MANY], {"kernel_shape": [2, 2]}),
    ("AveragePool", [MANY], {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    *((kind, [MANY], {}) for kind in ("GlobalAveragePool", "GlobalMaxPool")),
    ("LayerNormalization", [FEW, np.array([1, 2, 3], np.float32), np.array([0, 1, 0], np.float32)], {}),
    ("InstanceNormalization", [MANY, np.ones(4, np.float32), np.arange(4, dtype=np.float32)], {}),
    ("BatchNormalization", [MANY, *(np.arange(1, 5, dtype=np.float32) for _ in range(4))], {}),
    (
        "Gemm",
        [FEW, np.ones((4, 3), np.float32), np.arange(4, dtype=np.float32)],
        {"transB": 1, "alpha": 0.5, "beta": 2.0},
    ),
    ("Gemm", [FEW, [3, 4], [4]], {"alpha": 0.5}),
    ("Gemm", [[3, 2], np.ones((3, 4), np.float32)], {"transA": 1}),
    ("Gemm", [[4, 3], np.ones((3, 4), np.float32), np.arange(4, dtype=np.float32).reshape(4, 1)], {}),
    ("MatMul", [MANY, np.arange(12, dtype=np.float32).reshape(6, 2)], {}),
    ("Conv", [MANY, np.ones((1, 4, 3, 3), np.float32), None], {}),
    ("MaxPool", [MANY], {"kernel_shape": [3, 3], "pads": [2, 2, 2, 2]}),
    ("AveragePool", [MANY], {"kernel_shape": [3, 3], "pads": [2, 2, 2, 2], "count_include_pad": 1}),
    ("Slice", [FEW, np.array([2]), np.array([0]), np.array([0]), np.array([2])], {}),
    ("LayerNormalization", [MANY, np.arange(6, dtype=np.float32)], {"axis": 2}),
    ("Trilu", [[4, 4], None], {}),
    (
        "Conv",
        [MANY, np.ones((8, 2, 3, 3), np.float32), np.arange(8, dtype=np.float32)],
        {"group": 2, "strides": [2, 1]},
    ),
    ("Conv", [MANY, np.ones((1, 4, 3, 3), np.float32)], {"pads": [0, 0, 1, 1], "dilations": [2, 2]}),
]


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes"), ONE_NODE, ids=[f"{i}-{c[0]}" for i, c in enumerate(ONE_NODE)]
)
def test_an_operation_computes_what_onnxruntime_does(
    kind: str, inputs: list[Any], attributes: dict[str, Any], tmp_path: Path
) -> None:
    names = ["" if x is None else f"x{i}" for i, x in enumerate(inputs)]  # inputs that are left out have no name
    if kind == "MatMul2":
        kind, inputs = "MatMul", [FEW, [3, 2]]
    node = helper.make_node(kind, names, ["y"], **attributes)
    given = {name: x for name, x in zip(names, inputs, strict=True) if name}
    path = of_nodes(tmp_path / "one.onnx", [node], given)
    model = gp.from_onnx(path)
    numbers = [x + 0.1 for x in model.example]  # no zeros
    (expected,) = in_onnxruntime(path, *numbers)
    torch.testing.assert_close(model(*numbers), expected, rtol=1e-5, atol=1e-5)


def test_a_file_of_an_old_opset_has_axes_as_attributes(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["x"], ["a"], axes=[0]),
        helper.make_node("ReduceMean", ["a"], ["b"], axes=[2], keepdims=0),
        helper.make_node("Softmax", ["b"], ["y"]),
    ]
    path = of_nodes(tmp_path / "old.onnx", nodes, {"x": [2, 3]}, opset=11)
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]])
    expected = torch.tensor([[2.0, 6.0]]).softmax(-1)
    torch.testing.assert_close(gp.from_onnx(path)(x), expected)


def test_layers_that_share_a_weight_share_a_parameter(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["y"])]
    path = of_nodes(tmp_path / "tied.onnx", nodes, {"x": [2, 3], "w": np.eye(3, dtype=np.float32) * 2})
    model = gp.from_onnx(path)
    assert len(list(model.parameters())) == 1
    assert torch.equal(model(torch.ones(2, 3)), torch.full((2, 3), 4.0))


def test_a_weight_that_is_read_in_two_ways_is_two_parameters(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gemm", ["x", "w"], ["a"]),
        helper.make_node("Gemm", ["a", "w"], ["b"], transB=1),
        helper.make_node("Gemm", ["b", "w"], ["y"], alpha=3.0),
    ]
    path = of_nodes(tmp_path / "m.onnx", nodes, {"x": [2, 3], "w": np.arange(9, dtype=np.float32).reshape(3, 3) / 9})
    x = torch.randn(2, 3)
    torch.testing.assert_close(gp.from_onnx(path)(x), *in_onnxruntime(path, x))


def test_types_are_those_of_the_file(tmp_path: Path) -> None:
    cast = [helper.make_node("Cast", ["x"], ["i"], to=TensorProto.INT64)]
    low, weight = np.array(2), np.arange(6).reshape(3, 2)
    last = helper.make_node("Cast", ["j"], ["y"], to=TensorProto.FLOAT)
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]])
    for node in (
        helper.make_node("Clip", ["i", "k"], ["c"]),
        helper.make_node("MatMul", ["i", "w"], ["c"]),
        helper.make_node("Pow", ["i", "half"], ["c"]),
    ):
        divided = helper.make_node("Div", ["c", "k"], ["j"])  # of whole numbers
        inputs = {"x": [2, 3], "k": low, "w": weight, "half": np.array(1.5, np.float32)}
        path = of_nodes(tmp_path / "m.onnx", [*cast, node, divided, last], inputs)
        torch.testing.assert_close(gp.from_onnx(path)(x), *in_onnxruntime(path, x))


def test_weights_in_bfloat16_are_read(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["a"], to=TensorProto.BFLOAT16),
        helper.make_node("Gemm", ["a", "w", "w"], ["b"]),
        helper.make_node("Add", ["b", "w"], ["c"]),
        helper.make_node("Cast", ["c"], ["y"], to=TensorProto.FLOAT),
    ]
    path = of_nodes(tmp_path / "m.onnx", nodes, {"x": [2, 2]}, shape=[2, 2])
    model = onnx.load(path)
    model.graph.initializer.append(helper.make_tensor("w", TensorProto.BFLOAT16, [2, 2], [1.0, 0.0, 0.0, 3.0]))
    onnx.save(model, path)
    assert gp.from_onnx(path)(torch.ones(2, 2)).tolist() == [[3.0, 3.0], [1.0, 9.0]]
    with pytest.warns(UserWarning, match="not compared with onnxruntime"):
        onnx_import.check_like_onnxruntime(path, gp.from_onnx(path), [torch.ones(2, 2)], {})


@pytest.mark.parametrize("indices", [[1, 5], [[0, 1], [1, 2]]])
def test_sparse_initializers_are_read(indices: Any, tmp_path: Path) -> None:
    path = of_nodes(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [2, 3]}, shape=[2, 3])
    model, at = onnx.load(path), np.array(indices)
    values = helper.make_tensor("w", TensorProto.FLOAT, [2], [2.0, 3.0])
    where = helper.make_tensor("at", TensorProto.INT64, at.shape, at.reshape(-1).tolist())
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, where, [3, 3]))
    onnx.save(model, path)
    x = torch.randn(2, 3)
    torch.testing.assert_close(gp.from_onnx(path)(x), *in_onnxruntime(path, x))


def test_a_product_of_sizes_is_read(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Cast", ["s"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["c", "w"], ["y"]),
    ]
    path = of_nodes(tmp_path / "m.onnx", nodes, {"x": [2, 3], "w": np.ones((2, 4), np.float32)})
    assert gp.from_onnx(path)(torch.ones(2, 3)).tolist() == [5.0] * 4


def test_a_file_of_over_2_gb_is_checked_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = one_node(tmp_path / "m.onnx", "Relu")
    monkeypatch.setattr(onnx.checker, "MAXIMUM_PROTOBUF", 8)
    assert gp.from_onnx(path)(torch.ones(2, 3)).tolist() == [[1.0] * 3] * 2


def one_node(path: Path, kind: str, **options: Any) -> Path:
    return of_nodes(path, [helper.make_node(kind, ["x"], ["y"], **options)], {"x": [2, 3]}, shape=["n", "m"])


def test_what_is_not_read_is_said_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    branch = helper.make_graph([], "branch", [], [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])])
    random = [helper.make_node("RandomNormal", [], ["r"], shape=[2, 3]), helper.make_node("Add", ["x", "r"], ["y"])]
    condition = [
        helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch),
    ]
    two = [
        helper.make_node("MaxPool", ["x"], ["a", "i"], kernel_shape=[2, 2]),
        helper.make_node("Cast", ["i"], ["y"], to=1),
    ]
    cases: list[tuple[Any, str]] = [
        (lambda: of_nodes(path, condition, {"x": [2, 3], "c": np.array(True)}), "If"),
        (lambda: one_node(path, "Det2", domain="mine"), "Det2"),
        (lambda: one_node(path, "NonZero"), "NonZero"),
        (lambda: of_nodes(path, random, {"x": [2, 3]}), "RandomNormal"),
        (lambda: of_nodes(path, two, {"x": MANY}), "MaxPool with several outputs"),
        (lambda: path.write_bytes(b"no graph at all"), str(path)),
        (lambda: path.unlink(), str(path)),
    ]
    for make, said in cases:
        make()
        with pytest.raises(gp.GrowpruneError) as raised:
            gp.from_onnx(path)
        assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "attributes", "opset"),
    [
        ("BatchNormalization", {"training_mode": 1}, 18),
        ("AveragePool", {"kernel_shape": [2, 2], "dilations": [2, 2]}, 19),
    ],
)
def test_attributes_that_are_not_read_are_refused(
    kind: str, attributes: dict[str, Any], opset: int, tmp_path: Path
) -> None:
    stored = {name: np.ones(4, np.float32) for name in "sbmv"} if kind == "BatchNormalization" else {}
    node = helper.make_node(kind, ["x", *stored], ["y"], **attributes)
    path = of_nodes(tmp_path / "m.onnx", [node], {"x": MANY, **stored}, opset=opset, shape=["n"] * 4)
    with pytest.raises(gp.GrowpruneError, match=kind):
        gp.from_onnx(path)(torch.ones(MANY))


def test_what_an_onnx_file_does_not_need_is_refused(tmp_path: Path) -> None:
    path = one_node(tmp_path / "m.onnx", "Relu")
    with pytest.raises(gp.GrowpruneError, match="into"):
        gp.deploy(path, into=nn.Linear(3, 3))


def test_a_model_is_copied_saved_and_trained_sparse_as_any_other(tmp_path: Path) -> None:
    gp.export_onnx(Images().eval(), tmp_path / "m.onnx", torch.randn(2, 3, 9, 9))
    model, x = gp.from_onnx(tmp_path / "m.onnx"), torch.randn(2, 3, 9, 9)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sparsifier = gp.sparsify(model, optimizer, sparsity=0.8, iterations=20)
    for _ in range(20):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    again = gp.from_onnx(tmp_path / "m.onnx")
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(x), model(x)) and sparsifier.is_finished
    assert sparsifier.sparsity == pytest.approx(0.8, abs=0.01)


def test_a_file_without_zeros_is_not_deployed(tmp_path: Path) -> None:
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    path = of_nodes(tmp_path / "dense.onnx", [node], {"x": [2, 3], "w": np.ones((3, 3), np.float32)})
    with pytest.raises(gp.GrowpruneError, match=r"dense\.onnx"):
        gp.deploy(path)


def test_outputs_of_yes_and_no_are_compared_with_onnxruntime(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Greater", ["a", "w"], ["y"])]
    path = of_nodes(tmp_path / "m.onnx", nodes, {"x": [4, 4], "w": np.eye(4, dtype=np.float32)}, shape=[4, 4])
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.BOOL
    onnx.save(model, path)
    onnx_import.check_like_onnxruntime(path, gp.from_onnx(path), [torch.randn(4, 4)], {})
    with pytest.raises(gp.GrowpruneError, match="onnxruntime"):
        onnx_import.check_like_onnxruntime(path, torch.isnan, [torch.ones(4, 4)], {})


def test_quantized_weights_are_compared_with_the_numbers_of_the_file(tmp_path: Path) -> None:
    """And not with those of products that onnxruntime quantizes further."""
    nodes = [helper.make_node("DequantizeLinear", ["q", "s"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    numbers = np.random.default_rng(0)
    stored = {"q": numbers.integers(-5, 5, (3, 3)).astype(np.int8), "s": np.array(0.3, np.float32)}
    path = of_nodes(tmp_path / "m.onnx", nodes, {"x": [3, 3], **stored}, shape=[3, 3])
    x = torch.from_numpy(numbers.standard_normal((3, 3)).astype(np.float32))
    onnx_import.check_like_onnxruntime(path, gp.from_onnx(path), [x], {})


def test_other_outputs_than_those_of_onnxruntime_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Relu", ["a"], ["y"])]
    path = of_nodes(tmp_path / "m.onnx", node, {"x": [64, 64], "w": np.eye(64, dtype=np.float32)})
    assert gp.deploy(path, seconds=0).table.rows[0].choice == "sparse"
    monkeypatch.setitem(onnx_import.OPERATIONS, "Relu", torch.sigmoid)
    for example in (None, {"x": torch.randn(64, 64)}):
        with pytest.raises(gp.GrowpruneError, match="onnxruntime"):
            gp.deploy(path, example, seconds=0)


def test_the_command_deploys_a_file_that_loads_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = thinned(Images()), tmp_path / "pruned.onnx"
    gp.export_onnx(model, path, torch.randn(1, 3, 9, 9))
    words = ["deploy", str(path), "--out", str(tmp_path / "fast"), "--seconds", "0", "--example-shape", "2,3,9,9"]
    assert run(words) == 0
    x = torch.randn(2, 3, 9, 9)
    fast = gp.load_deployed(tmp_path / "fast", gp.from_onnx(path))
    torch.testing.assert_close(fast(x), model(x), rtol=0, atol=1e-4)
    capsys.readouterr()
    assert run(["deploy", str(path), "--out", str(tmp_path / "other"), "--model", "net.py:build"]) != 0
    assert "net.py:build" in capsys.readouterr().err


def run(words: list[str]) -> int:
    with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as ended:
        patched.setattr("sys.argv", ["growprune", *words])
        main()
    return int(ended.value.code or 0)
