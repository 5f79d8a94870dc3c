"""Attention as a system of particles: the particles are tokens, and the heads of a model move them."""

from .clusters import Clusters, clusters, eigenvalues, hyperplane_coordinates, leaders, matrix_rank, vertex_share
from .heads import HeadMatrices, head_matrices
from .simulate import Trajectory, simulate
from .spectra import Spectrum, spectra
from .tokens import embedded_tokens, random_tokens

__all__ = [
    "Clusters",
    "HeadMatrices",
    "Spectrum",
    "Trajectory",
    "clusters",
    "eigenvalues",
    "embedded_tokens",
    "head_matrices",
    "hyperplane_coordinates",
    "leaders",
    "matrix_rank",
    "random_tokens",
    "simulate",
    "spectra",
    "vertex_share",
]
