"""To be imported before torchvision, where its compiled operators cannot be loaded, and before what imports it.

PyPI's wheels of torchvision for Linux are linked against CUDA's libraries, which a CPU build of torch does not have.
All that then fails is a module which describes those operators (nms and such) to torch.compile: without it the
transforms and the models, which are Python, work.
"""

import sys
from types import ModuleType

sys.modules["torchvision._meta_registrations"] = ModuleType("torchvision._meta_registrations")
