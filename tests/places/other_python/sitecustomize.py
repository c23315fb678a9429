"""Has another Python of the same version find the packages of the one that runs the tests, and this package."""

import os
import site
import sys

site.addsitedir(os.environ["RING_TEST_PACKAGES"])
sys.path.append(os.environ["RING_TEST_PACKAGES"])
