"""What a trajectory does: how many clusters, who leads, where the tokens end, how low the rank of attention gets.

SPEC 8; Geshkovski et al. (2023), sections 2 to 5. Axes: T time, N token, E model width, C cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.spatial import ConvexHull
from sklearn.cluster import DBSCAN
from torch import Tensor

from .simulate import Trajectory

NEGLIGIBLE = 1e-30  # weights that no eigenvalue notices, but at which eigenvalue routines give up
HULL_WIDTH = 7  # Qhull's cost grows with N^(E / 2)


@dataclass(frozen=True, kw_only=True)
class Clusters:
    """Clusters over time.

    Attributes:
        times: (T,).
        labels: (T,N), the cluster of each token.
        centres: per time (C,E).
    """

    times: Tensor
    labels: Tensor
    centres: tuple[Tensor, ...]

    @property
    def counts(self) -> list[int]:
        """How many clusters there are at each time."""
        return [len(centres) for centres in self.centres]

    @property
    def collapse_time(self) -> float | None:
        """From when on there is a single cluster; None if there are several at the end."""
        several = [index for index, count in enumerate(self.counts) if count > 1]
        if several and several[-1] == len(self.counts) - 1:
            return None
        return float(self.times[several[-1] + 1 if several else 0])


def clusters(trajectory: Trajectory, tolerance: float = 0.05) -> Clusters:
    """Tokens of one initial condition belong together if a chain of steps below the tolerance joins them.

    Args:
        trajectory: of (T,N,E).
        tolerance: length of a step, as a share of the initial root-mean-square distance from the mean.

    Raises:
        ValueError: a batch of initial conditions.
    """
    z = _single(trajectory)
    spread = float((z[0] - z[0].mean(0)).square().sum(-1).mean().sqrt()) or 1.0
    labels, centres = [], []
    for points in z:
        found = torch.from_numpy(DBSCAN(eps=tolerance * spread, min_samples=1).fit_predict(points.cpu().numpy()))
        labels.append(found)
        centres.append(torch.stack([points.cpu()[found == each].mean(0) for each in range(int(found.max()) + 1)]))
    return Clusters(times=trajectory.times, labels=torch.stack(labels), centres=tuple(centres))


def leaders(attention: Tensor) -> list[int]:
    """The tokens that some token attends to most, from P (N,N)."""
    return sorted(set(attention.argmax(-1).tolist()))


def matrix_rank(attention: Tensor, tolerance: float = 1e-3) -> int:
    """Rank of P (N,N): singular values above the tolerance times the largest."""
    return int(torch.linalg.matrix_rank(attention, rtol=tolerance))


def eigenvalues(attention: Tensor) -> Tensor:
    """Eigenvalues (...,N), complex, of P (...,N,N), or of a sum of heads' P, whose largest modulus is their number."""
    found: Tensor = torch.linalg.eigvals(attention.masked_fill(attention < NEGLIGIBLE, 0.0))
    return found


def vertex_share(points: Tensor, tolerance: float = 0.05, start: Tensor | None = None) -> tuple[float, int]:
    """Share of the points (N,E) near a vertex of their convex hull, and how many separate vertices it has.

    Args:
        points: in up to seven dimensions of their own (they may lie in a plane of more).
        tolerance: as a share of the largest distance from the mean.
        start: the tokens that this distance is taken of, so that a collapse to one point is seen as one; the points
            themselves if left out.

    Raises:
        ValueError: more dimensions.
    """
    centred = (points - points.mean(0)).cpu().double()
    first = centred if start is None else (start - start.mean(0)).cpu().double()
    size = float(first.norm(dim=-1).max())
    if float(centred.norm(dim=-1).max()) <= tolerance * size:
        return 1.0, 1
    left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
    rank = int((singular > 1e-9 * singular[0]).sum())
    if rank > HULL_WIDTH:
        raise ValueError(f"the points span {rank} dimensions; a hull is computed in up to {HULL_WIDTH}.")
    flat = (left[:, :rank] * singular[:rank]).numpy()
    if rank == 1:
        corners = np.array([flat[:, 0].argmin(), flat[:, 0].argmax()])
    else:
        corners = ConvexHull(flat, qhull_options="QJ").vertices
    distances = torch.cdist(centred, centred[torch.from_numpy(corners)]).min(1).values
    separate = DBSCAN(eps=tolerance * size, min_samples=1).fit_predict(flat[corners])
    return float((distances <= tolerance * size).double().mean()), int(separate.max()) + 1


def hyperplane_coordinates(trajectory: Trajectory, value: Tensor) -> Tensor:
    """(T,N): z along the left eigenvector of V's leading eigenvalue; the theorem allows three values in the end.

    Args:
        trajectory: of one initial condition.
        value: V (E,E), whose eigenvalue with the largest real part must be real.

    Raises:
        ValueError: that eigenvalue is complex, or a batch of initial conditions.
    """
    eigenvalues, vectors = torch.linalg.eig(value.double().T)
    first = int(eigenvalues.real.argmax())
    if eigenvalues[first].imag != 0:
        raise ValueError("the leading eigenvalue of V is complex: there is no hyperplane to project on.")
    left = vectors[:, first].real
    coordinates: Tensor = _single(trajectory) @ (left / left.norm()).to(trajectory.z)
    return coordinates


def _single(trajectory: Trajectory) -> Tensor:
    if trajectory.z.dim() != 3:
        raise ValueError("this reads one initial condition; take one out of the batch first.")
    return trajectory.z
