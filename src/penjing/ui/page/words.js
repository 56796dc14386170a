// The words of the frame, and of several tabs. The other words of each tab are in its own file; their keys begin with the tab's name.

import { addWords, current } from "./i18n.js";

addWords({
  uiSkip: ["To the content", "跳到内容"],
  uiTabs: ["Parts of the page", "页面的各部分"],
  uiRuns: ["Runs", "运行"],
  uiTrain: ["Train", "训练"],
  uiPlan: ["Plan", "规划"],
  uiData: ["Data", "数据"],
  uiChat: ["Chat", "对话"],
  uiLoading: ["Loading…", "加载中…"],
  uiFailed: ["That did not work: {error}", "没有成功：{error}"],
  uiGone: ["The server does not answer. Runs go on without it; start it again with: penjing ui", "服务器没有回应。训练不受影响；重新启动：penjing ui"],
  uiNoToken: ["This page needs the whole address that `penjing ui` printed, with the token at its end.", "请使用 `penjing ui` 打印的完整地址，末尾带有令牌。"],
  uiCopyCommand: ["Copy the command", "复制命令"],
  uiCheckpoint: ["Checkpoint", "检查点"],
  uiStep: ["step {step}", "第 {step} 步"],
  uiCommand: ["The same on a command line", "等价的命令行"],
});

// Of the server's sentences: the mistakes that it names most often, what it wants instead, and what to do next.
const MISTAKES = {
  "no data": "没有数据", "no such file or folder": "没有这个文件或文件夹", "no such folder": "没有这个文件夹", "no such choice": "没有这个选项", "not a number": "不是数字", "not a whole number": "不是整数",
  "a number": "数字", "a whole number": "整数", "out of range": "超出范围", "not a price": "不是价格", "too large for a plan": "超出规划的范围",
  "more than there are": "多于总数", "unknown setting": "没有这个设置", "rows longer than the model's longest sequence": "序列比模型的最大长度还长",
  "the rows of a step do not divide evenly": "每步的序列不能平均分配", "this run is running": "这个运行正在训练", "this run is not running": "这个运行没有在训练", "no run in this folder": "这个文件夹里没有运行",
  "another process, or another machine, holds this run's lock": "这个运行正由另一个进程或另一台机器占用", "outside the folder of this page": "在本页面的文件夹之外",
  "Give data.train=FILE, or see `penjing data list`.": "请填写 data.train，或查看 `penjing data list`。",
};

/** A mistake as the server says it: WHERE: WHAT; got GOT; wanted WANTED. NEXT. In Chinese as far as it is known. */
export function said(message) {
  if (current() !== "zh") return message;
  const own = (text) => MISTAKES[text] ?? text.replace(/^Did you mean (.+)\?$/, "是否想写 $1？");
  const [, where, what, got, wanted, next] = /^(?:penjing: )?(?:(.*?): )?(.*?)(?:; got (.*?))?(?:; wanted (.*?))?(?:\. (.*))?$/s.exec(message);
  return [[where, "", "："], [own(what), "", ""], [got, "；实际为 ", ""], [wanted && own(wanted), "；应为 ", ""], [next && own(next), "。", ""]]
    .map(([text, before, after]) => (text ? before + text + after : "")).join("");
}
