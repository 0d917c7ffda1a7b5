"""Imports that ranks of the differential check are forked with, in addition to those of the tests."""

import lightning_pardist  # noqa: F401  (before lightning and torchvision)

import torchvision.models.detection  # isort: skip
import torchvision.models.segmentation  # noqa: F401
import transformers.modeling_utils
import transformers.models.auto.modeling_auto
import transformers.models.bart.modeling_bart
import transformers.models.bert.modeling_bert
import transformers.models.llama.modeling_llama
import transformers.models.vit.modeling_vit  # noqa: F401
