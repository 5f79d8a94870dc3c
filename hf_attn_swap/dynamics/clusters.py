"""Measures a trajectory: the number of clusters, the leaders, the polytope of the last tokens, the rank of attention.

Geshkovski et al. (2023), sections 2 to 5; docs/mathematics.md, section Dynamics of tokens.
Axes: T time, N token, E model width, C cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial import ConvexHull
from sklearn.cluster import DBSCAN
from torch import Tensor

from .simulate import Trajectory

NEGLIGIBLE = 1e-30  # weights below this do not change the eigenvalues, but make the eigenvalue routines fail
HULL_WIDTH = 7  # dimensions of the widest convex hull: Qhull's cost grows with N^(E / 2)


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Clusters over time.

    Attributes:
        times: (T,), the recorded times.
        labels: (T,N), the number of the cluster that each token belongs to.
        centres: one tensor (C,E) per time, the mean of each cluster's tokens.
    """

    times: Tensor
    labels: Tensor
    centres: tuple[Tensor, ...]

    @property
    def counts(self) -> list[int]:
        """The number of clusters at each time."""
        return [len(centres) for centres in self.centres]

    @property
    def collapse_time(self) -> float | None:
        """The time from which on there is a single cluster; None if there are several clusters at the last time."""
        several = [index for index, count in enumerate(self.counts) if count > 1]
        if not several:
            return float(self.times[0])
        if several[-1] == len(self.counts) - 1:
            return None
        return float(self.times[several[-1] + 1])


def clusters(trajectory: Trajectory, tolerance: float = 0.05) -> Clusters:
    """Group the tokens at each time: two tokens share a cluster if a chain of short steps between tokens joins them.

    Args:
        trajectory: the tokens (T,N,E).
        tolerance: the longest step of a chain, as a share of the tokens' root-mean-square distance from their mean at
            the first time.
    """
    z = trajectory.z
    spread = float((z[0] - z[0].mean(0)).square().sum(-1).mean().sqrt()) or 1.0
    labels, centres = [], []
    for points in z:
        label = torch.from_numpy(DBSCAN(eps=tolerance * spread, min_samples=1).fit_predict(points.cpu().numpy()))
        labels.append(label)
        centres.append(torch.stack([points.cpu()[label == number].mean(0) for number in range(int(label.max()) + 1)]))
    return Clusters(times=trajectory.times, labels=torch.stack(labels), centres=tuple(centres))


def leaders(attention: Tensor) -> list[int]:
    """The leaders in P (N,N): the tokens to which at least one token gives its largest weight."""
    return sorted(set(attention.argmax(-1).tolist()))


def matrix_rank(attention: Tensor, tolerance: float = 1e-3) -> int:
    """Rank of P (N,N): the number of singular values above the tolerance times the largest singular value."""
    return int(torch.linalg.matrix_rank(attention, rtol=tolerance))


def eigenvalues(attention: Tensor) -> Tensor:
    """Complex eigenvalues (...,N) of P (...,N,N).

    `attention` may also be the sum of P over heads; the largest modulus is then the number of heads.
    """
    values: Tensor = torch.linalg.eigvals(attention.masked_fill(attention < NEGLIGIBLE, 0.0))
    return values


def vertex_share(points: Tensor, tolerance: float = 0.05, start: Tensor | None = None) -> tuple[float, int]:
    """Share of the points (N,E) near a vertex of their convex hull, and the number of separate vertices of the hull.

    Args:
        points: (N,E). They may span at most seven dimensions; E may be larger.
        tolerance: the largest distance that counts as near, as a share of the largest distance of a `start` token
            from the mean of `start`.
        start: (N,E), the tokens before the simulation. With them, points that collapsed to one place count as one
            vertex. The points themselves if left out.

    Raises:
        ValueError: the points span more than seven dimensions.
    """
    centred = (points - points.mean(0)).cpu().double()
    first = centred if start is None else (start - start.mean(0)).cpu().double()
    size = float(first.norm(dim=-1).max())
    if float(centred.norm(dim=-1).max()) <= tolerance * size:
        return 1.0, 1
    left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
    rank = int((singular > 1e-9 * singular[0]).sum())
    if rank > HULL_WIDTH:
        raise ValueError(
            f"the points span {rank} dimensions, and a convex hull is computed in up to {HULL_WIDTH}; "
            "project the points first."
        )
    flat = (left[:, :rank] * singular[:rank]).numpy()
    if rank == 1:
        corners = np.array([flat[:, 0].argmin(), flat[:, 0].argmax()])
    else:
        corners = ConvexHull(flat, qhull_options="QJ").vertices
    distances = torch.cdist(centred, centred[torch.from_numpy(corners)]).min(1).values
    separate = DBSCAN(eps=tolerance * size, min_samples=1).fit_predict(flat[corners])
    return float((distances <= tolerance * size).double().mean()), int(separate.max()) + 1


def hyperplane_coordinates(trajectory: Trajectory, value: Tensor) -> Tensor:
    """(T,N): the coordinate of each token along the left eigenvector of V's leading eigenvalue.

    The hyperplane theorem says that these coordinates end at three values or fewer.

    Args:
        trajectory: the tokens (T,N,E).
        value: V (E,E). Its leading eigenvalue is the eigenvalue with the largest real part, and must be real.

    Raises:
        ValueError: the leading eigenvalue is complex.
    """
    eigenvalues, vectors = torch.linalg.eig(value.double().T)
    first = int(eigenvalues.real.argmax())
    if eigenvalues[first].imag != 0:
        raise ValueError("the leading eigenvalue of V is complex: there is no hyperplane to project on.")
    left = vectors[:, first].real
    coordinates: Tensor = trajectory.z @ (left / left.norm()).to(trajectory.z)
    return coordinates
