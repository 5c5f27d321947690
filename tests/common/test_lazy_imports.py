"""Modules that are imported only where they are used."""

from __future__ import annotations

import pytest

from tests.processes import python

TOOLKIT = """
import sys
from common.lazy_imports import lazily_imported
with lazily_imported("numpy", "scipy", "scipy.sparse"):
    import sagemaker_inference.transformer
assert "numpy" not in sys.modules and "scipy" not in sys.modules
from sagemaker_inference import decoder, encoder
assert decoder.decode("[1, 2]", "application/json").tolist() == [1, 2]
assert encoder.encode([1, 2], "text/csv") == "1\\n2\\n"
import numpy, scipy.sparse
assert numpy.array([1]).sum() == 1 and decoder.scipy.sparse.load_npz is scipy.sparse.load_npz
"""
LAUNCHER = """
import sys, warnings
from common.lazy_imports import lazily_imported
warnings.simplefilter("ignore")
with lazily_imported("numpy", "scipy", "scipy.sparse", "boto3"):
    from sagemaker_inference import model_server
assert not {"numpy", "scipy", "boto3"} & set(sys.modules)
assert model_server.boto3.client.__module__ == "boto3"
"""


@pytest.mark.parametrize("program", [TOOLKIT, LAUNCHER], ids=["toolkit", "launcher"])
def test_the_toolkit_is_imported_without_numpy_and_boto3_and_works(program: str) -> None:
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
