"""The tutorial about five articles: `articles.yaml` as walks through labs, and as pages in English and Chinese."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import yaml  # type: ignore[import-untyped]
from tests.lab.debug_commands.walks import Step, Walk, type_in_lab

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "examples" / "five-articles"
"""Manifests of the lab, and files that are typed."""
MODES = ("iptables", "nftables", "ipvs", "userspace")
OPTIONS = {
    "iptables": ("--overlay", "vxlan", "--pool", "192.168.15.0/28"),
    "nftables": ("--pool", "192.168.15.0/28"),
    "ipvs": ("--nodes", "1", "--pool", "192.168.15.0/28"),
    "userspace": ("--pool", "192.168.15.0/28"),
}
ALL = "all"


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a command prints; with `command`, another command than the article's."""

    shows: str = ""
    lacks: tuple[str, ...] = ()
    command: str = ""


class Texts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text in both languages."""

    en: str
    zh: str


class ArticleStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One command of an article."""

    at: str
    command: str
    then: str
    now: dict[str, str | tuple[Answer, ...]]
    why: Texts
    run: str = ""
    terminal: bool = False

    def answers(self, mode: str) -> tuple[Answer, ...]:
        """Return what it prints in a mode; nothing if it has no meaning there."""
        found = self.now.get(mode, self.now.get(ALL, ()))
        return (Answer(shows=found),) if isinstance(found, str) else found


class Article(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Commands in their order."""

    title: Texts
    steps: tuple[ArticleStep, ...]


def articles() -> list[Article]:
    """Return all articles."""
    return msgspec.convert(yaml.safe_load((Path(__file__).parent / "articles.yaml").read_text()), list[Article])


def walk_in_lab(mode: str) -> None:
    """Start a lab of a mode, and type the commands of all articles."""
    type_in_lab(mode, [_walk(each, mode) for each in articles()], DIRECTORY)


def _walk(article: Article, mode: str) -> Walk:
    steps = [
        Step(
            at=step.at,
            command=answer.command or step.command,
            shows=answer.shows,
            lacks=answer.lacks,
            run="" if answer.command else step.run,
            terminal=step.terminal,
        )
        for step in article.steps
        for answer in step.answers(mode)
    ]
    return Walk(title=article.title.en, about="", mode=mode, steps=tuple(steps), options=OPTIONS[mode])


class Language(msgspec.Struct, frozen=True):
    """Words of a page."""

    page: Path
    head: str
    then: str
    now: str
    absent: str
    """An answer without lines that contain a word."""
    instead: str
    every_mode: str
    only: str
    """Modes for which there is no answer."""
    end: str

    def of(self, texts: Texts) -> str:
        """Return the text of this language."""
        return (texts.zh if self.page.name.endswith(".zh-CN.md") else texts.en).strip()


EN = Language(
    page=ROOT / "docs/tutorial/five-articles.md",
    head="""\
# Five articles about kube-proxy, command by command

Many people learned how Services work from articles that list iptables rules. Kubernetes has changed since, and a reader who types these
commands today sees other output. This tutorial types the commands of five such articles in a lab, in their order. It shows what each
command printed then, what it prints now in each of the four modes, and why. [中文](five-articles.zh-CN.md)

## Before you begin

You need this repository after `make setup`, and root. Start a lab in the mode that you want to see, and open two shells:

```
narthex lab up examples/five-articles/manifests --mode iptables --overlay vxlan --pool 192.168.15.0/28
eval "$(narthex lab env)" && cd examples/five-articles/typed
narthex lab exec node-1 -- bash
```

"you" is the first shell, on this machine; `node-1` is the second one. `outside` is `narthex lab exec outside -- sh`. Mode ipvs needs a
kernel with IP_VS; the tests run it on such a kernel.

How to read the tables: `$name` is a word that differs in each run, and means the same word in the commands that follow. "no line with X"
means that the command prints nothing with X. "with `command`" shows the answer of the command that shows the same in this mode. Output is
cut to the lines that matter, and spaces don't count. The lab has Services with the names and ports of the articles, and addresses of its
own network.
""",
    then="then",
    now="now",
    absent="no line with {}",
    instead="with {}:",
    every_mode="now, all modes",
    only="not in this mode",
    end="""
## What you have seen

* Names of chains: `KUBE-XLB-…` became `KUBE-EXT-…` and `KUBE-SVL-…`; `KUBE-FW-…` remains for source ranges; `KUBE-MARK-DROP` is gone.
* Hashes: those of unnamed ports changed with the colon; those of named ports are the same; those of endpoints differ in each cluster.
* Listeners: no process listens on a node port, except in mode userspace at another port.
* Modes: the path is the same, and what stands for it in the kernel differs: chains, elements of maps, virtual servers, or a relay.

Remove the lab with `narthex lab down`. To see the path of a packet in one command, in any mode, run `narthex trace outside
192.168.49.11:30080 --lab`, and read [how to trace a path](../howto/trace-a-path.md).
""",
)
ZH = Language(
    page=ROOT / "docs/tutorial/five-articles.zh-CN.md",
    head="""\
# 五篇 kube-proxy 文章，逐条命令

很多人从罗列 iptables 规则的文章里学会了 Service 的原理。Kubernetes 后来变了，今天照着敲这些命令，看到的输出已经不同。本教程在实验环境里按顺序
敲一遍五篇文章里的命令：当时打印什么，现在在四种模式下各打印什么，以及为什么。[English](five-articles.md)

## 准备

需要本仓库（已运行 `make setup`）和 root 权限。用想看的模式启动实验环境，再打开两个 shell：

```
narthex lab up examples/five-articles/manifests --mode iptables --overlay vxlan --pool 192.168.15.0/28
eval "$(narthex lab env)" && cd examples/five-articles/typed
narthex lab exec node-1 -- bash
```

表中的 you 是第一个 shell，即本机；`node-1` 是第二个；`outside` 是 `narthex lab exec outside -- sh`。ipvs 模式需要带 IP_VS 的内核，测试在这样的
内核上运行它。

读表方法：`$name` 是每次运行都不同的词，后面的命令里同名的词相同。“没有含 X 的行”表示命令不打印任何含 X 的内容。“用 `命令`”给出在该模式下显示同样
信息的命令及其输出。输出只保留要点，空格不计。实验环境里的服务使用原文的名称和端口，地址属于它自己的网络。
""",
    then="当时",
    now="现在",
    absent="没有含 {} 的行",
    instead="用 {}：",
    every_mode="现在，所有模式",
    only="此模式没有",
    end="""
## 看到了什么

* 链名：`KUBE-XLB-…` 变成 `KUBE-EXT-…` 和 `KUBE-SVL-…`；`KUBE-FW-…` 只在有源地址范围时存在；`KUBE-MARK-DROP` 已取消。
* 哈希：未命名端口去掉了冒号，哈希随之改变；命名端口的哈希不变；端点的哈希每个集群都不同。
* 监听：没有进程监听节点端口；userspace 模式监听的是另一个端口。
* 模式：数据包的路径相同，内核里代表它的东西不同：链、映射元素、虚拟服务器或中继。

用 `narthex lab down` 删除实验环境。想用一条命令看任意模式下的路径，运行 `narthex trace outside 192.168.49.11:30080 --lab`，并阅读
[如何追踪路径](../howto/trace-a-path.md)。
""",
)


def page(language: Language) -> str:
    """Return the tutorial in a language."""
    return (
        language.head + "".join(part for article in articles() for part in _section(article, language)) + language.end
    )


def _section(article: Article, language: Language) -> Iterator[str]:
    yield f"\n## {language.of(article.title)}\n"
    for step in article.steps:
        yield f"\n### {_code(step.command)}\n\n| {step.at} | |\n| --- | --- |\n"
        yield f"| {language.then} | {_lines(step.then)} |\n"
        if ALL in step.now:
            yield f"| {language.every_mode} | {_answers(step.answers(ALL), language)} |\n"
        else:
            for mode in MODES:
                yield f"| {language.now}, {mode} | {_answers(step.answers(mode), language)} |\n"
        if why := language.of(step.why):
            yield f"\n{why}\n"


def _answers(answers: tuple[Answer, ...], language: Language) -> str:
    parts = []
    for answer in answers:
        parts += [language.instead.format(_code(answer.command))] if answer.command else []
        parts += [_lines(answer.shows)] if answer.shows else []
        parts += [language.absent.format(_code(word)) for word in answer.lacks]
    return "<br>".join(parts) or language.only


def _lines(text: str) -> str:
    return "<br>".join(_code(" ".join(line.split())) for line in text.splitlines())


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"
