"""Selection: the ranking of clusters, and the walk through them up to the budget."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from clusterkv_ops import ClusterIndex, TokenSelection, reference, select_clusters
from tests.ops.inputs import (
    DTYPES,
    SHAPES,
    Shape,
    generator,
    index_of,
    query_for,
    random,
    random_index,
)

ops = torch.ops.clusterkv
HEAD_RULES = ["query_head", "kv_head"]


def integers(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """From -2 to 2: inner products are exact in float32, and many of them are equal."""
    return torch.randint(-2, 3, shape, generator=generator(seed)).to(device=device, dtype=dtype)


def ranks(query: Tensor, index: ClusterIndex, head_rule: str, dtype: torch.dtype) -> Tensor:
    """`[B, Hs, C]`: what the clusters are ranked by, -inf where they are empty."""
    batch, num_kv_heads, num_clusters, head_dim = index.centroids.shape
    scores = query.to(dtype).reshape(batch, num_kv_heads, -1, head_dim) @ index.centroids.to(
        dtype
    ).transpose(-1, -2)
    sizes = index.indptr.diff().unsqueeze(2).to(dtype)
    if head_rule == "kv_head":
        logits = scores * head_dim**-0.5 + sizes.log()
        scores = (logits.softmax(dim=-1).sum(dim=2, keepdim=True)) / sizes
    return torch.where(sizes > 0, scores, -torch.inf).reshape(batch, -1, num_clusters)


def assert_walks_in_rank_order(
    selection: TokenSelection, query: Tensor, index: ClusterIndex, head_rule: str, budget: int
) -> None:
    """Whole clusters, best first as far as float32 can tell, the last one trimmed."""
    exact = ranks(query, index, head_rule, torch.float64)
    low = ranks(query, index, head_rule, torch.float32).double()
    is_full = exact > -torch.inf
    error = 2 * (low - exact)[is_full].abs().max() if is_full.any() else torch.tensor(0.0)
    batch, heads, num_clusters = exact.shape
    assert selection.indices.shape == (batch, heads, budget)
    assert selection.num_selected.shape == (batch, heads)
    assert selection.indices.dtype == selection.num_selected.dtype == torch.int32
    group = heads // index.indptr.shape[1]
    for row in range(batch):
        for head in range(heads):
            rank = exact[row, head].tolist()
            indptr = index.indptr[row, head // group].tolist()
            indices = index.indices[row, head // group].tolist()
            clusters = [indices[indptr[c] : indptr[c + 1]] for c in range(num_clusters)]
            cluster_of = {token: c for c, tokens in enumerate(clusters) for token in tokens}
            count = min(budget, indptr[-1])
            chosen = selection.indices[row, head].tolist()
            assert selection.num_selected[row, head] == count
            assert chosen[count:] == [-1] * (budget - count)
            taken = list(dict.fromkeys(cluster_of[token] for token in chosen[:count]))
            walked = [token for c in taken for token in clusters[c]]
            assert walked[:count] == chosen[:count]
            assert len(walked) - len(clusters[taken[-1]]) < count if taken else count == 0
            left = [rank[c] for c in range(num_clusters) if clusters[c] and c not in taken]
            order = [rank[c] for c in taken] + ([max(left)] if left else [])
            assert all(a >= b - 2 * error for a, b in pairwise(order))


@pytest.mark.parametrize("head_rule", HEAD_RULES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_selection_matches_the_oracle(
    device: torch.device, dtype: torch.dtype, shape: Shape, head_rule: str
) -> None:
    index, query = random_index(shape, device), query_for(shape, dtype, device)
    scale = shape.head_dim**-0.5
    for budget in (1, shape.kv_len // 3 + 1, shape.kv_len + 5):
        arguments = (query, *index, budget, head_rule, scale)
        for implementation in (ops.select_clusters, reference.select_clusters):
            selection = TokenSelection(*implementation(*arguments))
            assert_walks_in_rank_order(selection, query, index, head_rule, budget)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 33, 64, 96])
def test_equal_scores_go_to_the_lower_cluster(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> None:
    """Exact arithmetic with many ties: every token is where a sort by (score, cluster) puts it."""
    index = random_index(Shape(kv_len=300, clusters=60, head_dim=head_dim), device)
    centroids = integers(2, 2, 60, head_dim, dtype=torch.float32, device=device)
    query = integers(2, 8, 1, head_dim, dtype=dtype, device=device, seed=1)
    arguments = (query, centroids, *index[1:], 200, "query_head", 1.0)
    actual, expected = ops.select_clusters(*arguments), reference.select_clusters(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    for row, head in product(range(2), range(8)):
        scores = (centroids[row, head // 4] @ query[row, head, 0].float()).tolist()
        assert len(set(scores)) < 50
        indptr, indices = (tensor[row, head // 4].tolist() for tensor in index[1:])
        order = sorted(range(60), key=lambda cluster: (-scores[cluster], cluster))
        walk = [token for c in order for token in indices[indptr[c] : indptr[c + 1]]]
        assert actual[0][row, head].tolist() == walk[:200]


@pytest.mark.parametrize("clusters", [17, 255, 256, 257, 300, 513, 1000, 2049, 5000])
def test_ranking_equals_topk_for_any_number_of_clusters(
    device: torch.device, clusters: int
) -> None:
    """One token a cluster, so the selected tokens are the ranking itself."""
    centroids = random(1, 2, clusters, 32, dtype=torch.float32, device=device)
    token = torch.arange(clusters, device=device, dtype=torch.int32)
    indices = token.flip(0).expand(1, 2, -1).contiguous()
    indptr = torch.arange(clusters + 1, device=device, dtype=torch.int32).expand(1, 2, -1)
    index = ClusterIndex(centroids, indptr.contiguous(), indices)
    query = random(1, 4, 1, 32, dtype=torch.float32, device=device, seed=1)
    scores = (query.view(1, 2, 2, 32) @ centroids.transpose(-1, -2)).view(1, 4, -1)
    for budget in (1, clusters // 2, clusters):
        selected, _ = select_clusters(query, index, budget=budget)
        by_selection = scores.gather(-1, (clusters - 1 - selected).long())
        by_topk = scores.topk(budget, dim=-1).values
        rounding = 64 * torch.finfo(torch.float32).eps * scores.abs().max()  # 2 x head_dim x eps
        assert (by_selection - by_topk).abs().max() <= rounding
        assert all(row.unique().numel() == budget for row in selected[0])


@pytest.mark.parametrize("head_rule", HEAD_RULES)
def test_last_cluster_is_trimmed_to_the_budget(device: torch.device, head_rule: str) -> None:
    """Sizes 3, 0, 4, 2, ranked 2, 0, 3; cluster 1 would be the best and is empty."""
    centroids = torch.tensor([2.0, 9.0, 3.0, 1.0], device=device).view(1, 1, 4, 1)
    labels = torch.tensor([0, 2, 3, 2, 0, 2, 2, 0, 3], device=device).view(1, 1, 9)
    index = index_of(labels, centroids, capacity=12)
    query = torch.ones(1, 1, 1, 1, device=device)
    walk = [1, 3, 5, 6, 0, 4, 7, 2, 8]
    for budget in range(1, 12):
        indices, num_selected = select_clusters(query, index, budget=budget, head_rule=head_rule)
        expected = (walk + [-1] * 3)[:budget]
        assert indices.tolist() == [[expected]]
        assert num_selected.tolist() == [[min(budget, 9)]]


def test_ranking_is_by_inner_product_not_by_cosine(device: torch.device) -> None:
    centroids = torch.tensor([[1.0, 0.0], [4.0, 4.0]], device=device).view(1, 1, 2, 2)
    index = index_of(torch.tensor([[[0, 1]]], device=device), centroids)
    query = torch.tensor([1.0, 0.0], device=device).view(1, 1, 1, 2)
    assert select_clusters(query, index, budget=1).indices.tolist() == [[[1]]]


def test_one_choice_per_kv_head_weighs_softmax_mass_per_token(device: torch.device) -> None:
    """Head 0 looks at cluster 0 sharply; head 1 at cluster 1, which has three tokens."""
    centroids = torch.tensor([[8.0, 0.0], [0.0, 8.0], [-9.0, -9.0]], device=device)
    index = index_of(torch.tensor([[[1, 0, 1, 1, 2]]], device=device), centroids.view(1, 1, 3, 2))
    query = torch.tensor([[1.0, 0.0], [0.0, 1.0]], device=device).view(1, 2, 1, 2)
    indices, num_selected = select_clusters(query, index, budget=3, head_rule="kv_head", scale=1.0)
    assert indices.tolist() == [[[1, 0, 2]]]  # mass 1 on one token beats mass 1 on three
    assert num_selected.tolist() == [[3]]


@pytest.mark.parametrize("head_rule", HEAD_RULES)
def test_an_index_without_tokens_selects_nothing(device: torch.device, head_rule: str) -> None:
    shape = Shape(kv_len=20, clusters=4)
    index = random_index(shape, device)
    index.indptr.zero_()
    query = query_for(shape, torch.float32, device)
    indices, num_selected = select_clusters(query, index, budget=8, head_rule=head_rule)
    assert (indices == -1).all()
    assert (num_selected == 0).all()


@pytest.mark.parametrize("head_rule", HEAD_RULES)
def test_room_behind_the_index_changes_nothing(device: torch.device, head_rule: str) -> None:
    shape = Shape(kv_len=80)
    index, query = random_index(shape, device), query_for(shape, torch.float32, device)
    more = torch.full((2, 2, 30, 64), 100.0, device=device)
    roomy = ClusterIndex(
        torch.cat([index.centroids, more], dim=2),
        torch.cat([index.indptr, index.indptr[:, :, -1:].expand(-1, -1, 30)], dim=2),
        torch.cat([index.indices, index.indices.new_full((2, 2, 50), -1)], dim=2),
    )
    for budget in (10, 100):
        tight = select_clusters(query, index, budget=budget, head_rule=head_rule)
        loose = select_clusters(query, roomy, budget=budget, head_rule=head_rule)
        assert all(torch.equal(a, b) for a, b in zip(tight, loose, strict=True))


@pytest.mark.parametrize("head_rule", HEAD_RULES)
def test_a_row_and_a_head_depend_on_nothing_else(device: torch.device, head_rule: str) -> None:
    shape = Shape(batch=3, heads=3, group=2, kv_len=200, clusters=40)
    index, query = random_index(shape, device), query_for(shape, torch.float32, device)
    together = select_clusters(query, index, budget=70, head_rule=head_rule)
    rankings = together.indices.shape[1] // 3
    for row in range(3):
        for head in range(3):
            part = ClusterIndex(*(t[row : row + 1, head : head + 1] for t in index))
            heads = query[row : row + 1, 2 * head : 2 * head + 2]
            alone = select_clusters(heads, part, budget=70, head_rule=head_rule)
            mine = slice(head * rankings, (head + 1) * rankings)
            assert torch.equal(together.indices[row, mine], alone.indices[0])


@pytest.mark.parametrize("head_rule", HEAD_RULES)
@pytest.mark.usefixtures("num_threads")
def test_the_number_of_threads_does_not_change_a_bit(head_rule: str) -> None:
    shape = Shape(kv_len=3000, clusters=300)
    device = torch.device("cpu")
    index, query = random_index(shape, device), query_for(shape, torch.bfloat16, device)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(select_clusters(query, index, budget=999, head_rule=head_rule))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_extreme_logits_do_not_spoil_the_ranking(device: torch.device) -> None:
    """exp would overflow or vanish without a running maximum."""
    centroids = torch.tensor([-400.0, 300.0, 299.0, 0.0], device=device).view(1, 1, 4, 1)
    index = index_of(torch.tensor([[[0, 1, 2, 3]]], device=device), centroids)
    query = torch.ones(1, 2, 1, 1, device=device)
    chosen = select_clusters(query, index, budget=2, head_rule="kv_head", scale=1.0).indices
    assert chosen.tolist() == [[[1, 2]]]


def test_opcheck(device: torch.device) -> None:
    shape = Shape(kv_len=40)
    index, query = random_index(shape, device), query_for(shape, torch.float32, device)
    for head_rule in HEAD_RULES:
        torch.library.opcheck(ops.select_clusters, (query, *index, 20, head_rule, 0.125))


def test_the_verb_compiles_without_a_graph_break(device: torch.device) -> None:
    def program(query: Tensor, index: ClusterIndex) -> tuple[Tensor, ...]:
        one = select_clusters(query, index, budget=20)
        return (*one, *select_clusters(query, index, budget=9, head_rule="kv_head"))

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for kv_len, clusters in ((60, 9), (75, 11), (90, 17)):
            shape = Shape(kv_len=kv_len, clusters=clusters, head_dim=32)
            index, query = random_index(shape, device), query_for(shape, torch.float32, device)
            actual, expected = compiled(query, index), program(query, index)
            assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
