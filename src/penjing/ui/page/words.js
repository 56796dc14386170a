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
  "it continues from the last": "将从最后一个检查点继续", "incidents.jsonl names the samples": "相关样本见 incidents.jsonl",
  "Lower optimizer.learning_rate or raise schedule.warmup_ratio; checkpoints are intact.": "请降低 optimizer.learning_rate 或提高 schedule.warmup_ratio；检查点完好。",
  "cannot write: the disk is full": "无法写入：磁盘已满", "cannot write: permission denied": "无法写入：没有权限", "Nothing that was there before is lost.": "原有的文件没有丢失。",
};

// Those with a name or a figure in them; several may be parts of one sentence.
const PARTS = [
  [/^Did you mean (.+)\?$/, "是否想写 $1？"],
  [/^stopped by (\w+) after step (\d+)/, "在第 $2 步后因 $1 停止"],
  [/; the same command continues$/, "；重新执行同样的命令即可继续"],
  [/; the disk refused a checkpoint$/, "；磁盘没能写入检查点"],
  [/^loss or gradients were not finite in (\d+) steps in a row, up to step (\d+)/, "到第 $2 步为止，连续 $1 步的损失或梯度为 NaN 或 Inf"],
  [/ after (\d+) rollbacks to a checkpoint$/, "，此前已回退到检查点 $1 次"],
  [/^held-out ([\w ]+) ([\d.]+) is ([\d.]+) above its best, ([\d.]+) at step (\d+)/, "验证集 $1 为 $2，比最低值 $4（第 $5 步）高 $3"],
  [/, which is kept/, "，最低时的检查点已保留"],
  [/; eval.patience=N stops such a run$/, "；设置 eval.patience=N 可让这样的运行提前停止"],
];

/** A mistake as the server says it: WHERE: WHAT; got GOT; wanted WANTED. NEXT. In Chinese as far as it is known. */
export function said(message) {
  if (current() !== "zh") return message;
  const own = (text) => MISTAKES[text] ?? PARTS.reduce((sofar, [part, chinese]) => sofar.replace(part, chinese), text);
  const [, where, what, got, wanted, next] = /^(?:penjing: )?(?:(.*?): )?(.*?)(?:; got (.*?))?(?:; wanted (.*?))?(?:\. (.*))?$/s.exec(message);
  return [[where && own(where), "", "："], [own(what), "", ""], [got, "；实际为 ", ""], [wanted && own(wanted), "；应为 ", ""], [next && own(next), "。", ""]]
    .map(([text, before, after]) => (text ? before + text + after : "")).join("");
}
