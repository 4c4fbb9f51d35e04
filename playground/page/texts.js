// The words of the page in its languages. What Narthex itself says, is English, as in the terminal.

const TEXTS = {
  en: {
    title: "Narthex playground", playground: "playground", skip: "Skip to the input",
    tagline: "Why does the packet not arrive? Paste the rules, and see its path.",
    language: "Language", theme: "Theme", themeSystem: "system", themeLight: "light", themeDark: "dark",
    question: "Your packet", from: "From", to: "To",
    endsHint: "An address, a pod (namespace/name), a node, or “outside”; to a Service, an address or a name, with :port and /protocol.",
    rules: "Rules, manifests, or a whole bug report", files: "Files", addFiles: "Add files",
    dropHint: "or drop them here: a bundle, manifests, output of several tools",
    sourceHint: "Output of iptables-save, nft list ruleset, ipvsadm, ip route …; kubectl get -o yaml; or an issue's text with all of them. Nothing leaves this page.",
    placeholder: "# iptables-save\n*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j KUBE-SERVICES\n…",
    more: "More about the node", optionNode: "Node", optionNodeIp: "Address of the node", optionIif: "Comes in by",
    optionCidr: "Pod network", optionSport: "Source port", optionMode: "Mode", modeDefault: "as the input says",
    trace: "Trace", clear: "Clear", thread: "The thread", answer: "The answer", share: "Share",
    copy: "Copy as text for the ticket", link: "Copy a link", savePage: "Save as a page", saveJson: "Save as JSON",
    terminal: "The same in a terminal:", gallery: "Examples", galleryHint: "Each button fills in the input and traces.",
    walks: "Five walks through a node", bugs: "Ten famous bugs",
    loading: "Loading …", starting: "Starting Python …", preparing: "Loading Narthex …", ready: "Ready. Nothing that you paste leaves this page.",
    tracing: "Following the packet …", nothing: "Paste rules or add a file first.", remove: "Remove {}", added: "Files added: {}",
    copied: "Copied. Paste it into the ticket.", copiedLink: "Copied. The link holds the whole input; whoever has the link can read it.",
    longLink: "Copied. The link is {} kB long; some programs cut such links. Send the input as a file instead.",
    notCopied: "The browser does not permit copying here.", broken: "This should not happen: {}",
    notLoaded: "The playground cannot be loaded: {}", badLink: "The link is damaged: {}",
  },
  zh: {
    title: "Narthex 演练场", playground: "演练场", skip: "跳到输入框",
    tagline: "数据包为什么到不了？粘贴规则，看它的路径。",
    language: "语言", theme: "主题", themeSystem: "跟随系统", themeLight: "浅色", themeDark: "深色",
    question: "您的数据包", from: "来源", to: "目标",
    endsHint: "地址、Pod（命名空间/名称）、节点或 “outside”；目标可以是 Service、地址或域名，可带 :端口 和 /协议。",
    rules: "规则、清单，或整份故障报告", files: "文件", addFiles: "添加文件",
    dropHint: "或拖放到此处：节点包、清单、多个工具的输出",
    sourceHint: "iptables-save、nft list ruleset、ipvsadm、ip route 等的输出；kubectl get -o yaml；或包含这些内容的 issue 全文。任何内容都不会离开本页。",
    placeholder: "# iptables-save\n*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j KUBE-SERVICES\n…",
    more: "关于节点的更多信息", optionNode: "节点", optionNodeIp: "节点地址", optionIif: "入接口",
    optionCidr: "Pod 网段", optionSport: "源端口", optionMode: "模式", modeDefault: "由输入决定",
    trace: "追踪", clear: "清空", thread: "原讨论", answer: "结果", share: "分享",
    copy: "复制为工单文本", link: "复制链接", savePage: "保存为网页", saveJson: "保存为 JSON",
    terminal: "在终端中的等效命令：", gallery: "示例", galleryHint: "点击按钮即填入输入并追踪。",
    walks: "节点内的五条路径", bugs: "十个著名的故障",
    loading: "正在加载……", starting: "正在启动 Python……", preparing: "正在加载 Narthex……", ready: "就绪。您粘贴的内容不会离开本页。",
    tracing: "正在跟踪数据包……", nothing: "请先粘贴规则或添加文件。", remove: "移除 {}", added: "已添加文件：{} 个",
    copied: "已复制，可粘贴到工单中。", copiedLink: "已复制。链接包含全部输入，得到链接的人都能看到。",
    longLink: "已复制。链接长 {} kB，有些程序会截断；请改用文件发送输入。",
    notCopied: "浏览器不允许在此复制。", broken: "不应发生的错误：{}",
    notLoaded: "演练场无法加载：{}", badLink: "链接已损坏：{}",
  },
};

// Headings of Narthex's page for a ticket.
const HEADINGS = {zh: {"The path": "路径", "Step by step": "逐步说明"}};
const BEGINNINGS = {zh: [["Why not: ", "原因："], ["Also: ", "另外："]]};

export function language() {
  const kept = localStorage.getItem("narthex-language");
  if (kept in TEXTS) return kept;
  return navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
}

export const setLanguage = chosen => localStorage.setItem("narthex-language", chosen);

export const text = (key, value = "") => TEXTS[language()][key].replace("{}", () => value);

export function headings(found) {
  const begin = (BEGINNINGS[language()] ?? []).find(([english]) => found.startsWith(english));
  return begin ? begin[1] + found.slice(begin[0].length) : HEADINGS[language()]?.[found] ?? found;
}
