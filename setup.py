"""Packaging of rlpost: what it needs, with bounds.

Lower bounds are the versions that the tests ran with; upper bounds stop where
a library may change its interface.
"""

import setuptools

setuptools.setup(
  name='rlpost',
  version='0.1.0',
  description='Post-training of language models in JAX.',
  author='The rlpost authors',
  license='Apache-2.0',
  python_requires='>=3.11',
  # '.' puts the checkout on the path of an editable install: tools/bench/*.py
  # and notebooks then find rlpost, experiments and tools from any folder.
  package_dir={'': '.'},
  packages=setuptools.find_packages(include=['rlpost', 'rlpost.*']),
  install_requires=[
    'absl-py>=2.5.1,<3',
    'array_record>=0.8.6,<0.9',
    'chex>=0.1.92,<0.2',
    'etils[epath]>=1.15,<2',
    'flax>=0.12.8,<0.13',
    'gguf>=0.19,<0.20',
    'grain>=0.2.18,<0.3',
    'huggingface_hub>=2.4,<3',
    'jax>=0.10.2,<0.11',
    'jinja2>=3.1.6,<4',
    'matplotlib>=3.11,<4',
    'ml-collections>=1.1,<2',
    'ml_dtypes>=0.6,<0.7',
    'numpy>=2.4,<3',
    'optax>=0.2.8,<0.3',
    'orbax-checkpoint>=0.12.8,<1.0',  # 1.0 replaces the top-level interface
    'pytest>=9.2,<10',
    'reasoning-gym==0.1.25',  # another version draws other tasks
    'rich>=15,<16',
    'safetensors>=0.8,<0.9',
    'tensorflow-datasets>=4.9.10,<5',
    'tokenizers>=0.23,<0.24',
  ],
  extras_require={
    'dev': ['ruff>=0.17,<0.18'],
    'notebook': ['ipykernel', 'nbclient', 'nbformat'],
    'oracle': ['accelerate', 'regex', 'torch', 'transformers>=5,<6'],
    'tensorboard': ['tensorboardX>=2.6.5,<3'],
    'tpu': ['jax[tpu]'],
    'tpu-aot': ['libtpu==0.0.42.*'],
    'wandb': ['wandb'],
  },
)
