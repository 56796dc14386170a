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

// What the server says in English: charts and what they measure, states, parts of a plan, records, and the mistakes that
// it names most often, with what it wants instead and what to do next.
const CHINESE = {
  __proto__: null, // a word may be "constructor"
  "nats per token": "每词元 nat", "bits per byte (held out)": "每字节比特（验证集）", "nats per pair": "每对 nat",
  "loss per pair or answer": "每个偏好对或回答的损失", "mean reward of an answer": "每个回答的平均奖励",
  "nats per answer": "每个回答 nat", "chosen − rejected": "优选 − 劣选", "times the mean": "平均值的倍数",
  "fraction of questions": "题目占比", "fraction of prompts": "提示占比", "fraction of pairs": "偏好对占比",
  "fraction of tokens": "词元占比", "fraction of groups": "组占比", "fraction of answers": "回答占比",
  "standard deviation": "标准差", "learning rate": "学习率", "gradient norm (log)": "梯度范数（对数）",
  "loss": "损失", "reward": "奖励", "tokens": "词元", "tokens/s": "词元/秒",
  "training": "训练", "chosen": "优选", "rejected": "劣选", "mean": "平均", "worst": "最大",
  "running": "运行中", "starting": "启动中", "finished": "已完成", "stopped": "已停止", "interrupted": "已中断",
  "failed": "失败", "killed": "被终止", "out of memory": "内存不足",
  "not finite": "出现 NaN 或 Inf", "spike": "损失突增", "rolled back": "回退到检查点",
  "held-out loss rises": "验证损失上升", "checkpoint not written": "检查点未写入",
  "time": "时间", "validation": "验证", "checkpoint": "检查点", "sample": "样例", "waiting for data": "等待数据",
  "time, re-fit (L3)": "时间，重新拟合（L3）", "wall, start-up with it": "总时间，含启动", "peak memory": "内存峰值",
  "speed": "速度", "held-out loss": "验证损失",
  "documents": "文档", "chats": "对话", "preferences": "偏好对", "prompts": "提示",
  "Latin": "拉丁字母", "Han": "汉字", "digits": "数字", "other": "其他", "min": "最小", "max": "最大",
  "document, bytes": "文档，字节", "conversation, messages": "对话，消息数", "answer, bytes": "回答，字节",
  "prompt, messages": "提示，消息数", "prompt, bytes": "提示，字节",
  "chosen, bytes": "优选回答，字节", "rejected, bytes": "劣选回答，字节",
  "no data": "没有数据", "no such file or folder": "没有这个文件或文件夹", "no such folder": "没有这个文件夹",
  "no such choice": "没有这个选项", "unknown setting": "没有这个设置", "out of range": "超出范围",
  "not a number": "不是数字", "not a whole number": "不是整数", "not a price": "不是价格",
  "a number": "数字", "a whole number": "整数", "too large for a plan": "超出规划的范围", "more than there are": "多于总数",
  "rows longer than the model's longest sequence": "序列比模型的最大长度还长",
  "the rows of a step do not divide evenly": "每步的序列不能平均分配",
  "this run is running": "这个运行正在训练", "this run is not running": "这个运行没有在训练",
  "no run in this folder": "这个文件夹里没有运行", "outside the folder of this page": "在本页面的文件夹之外",
  "another process, or another machine, holds this run's lock": "这个运行正由另一个进程或另一台机器占用",
  "Give data.train=FILE, or see `penjing data list`.": "请填写 data.train，或查看 `penjing data list`。",
  "it continues from the last": "将从最后一个检查点继续", "incidents.jsonl names the samples": "相关样本见 incidents.jsonl",
  "Lower optimizer.learning_rate or raise schedule.warmup_ratio; checkpoints are intact.":
    "请降低 optimizer.learning_rate 或提高 schedule.warmup_ratio；检查点完好。",
  "cannot write: the disk is full": "无法写入：磁盘已满", "Nothing that was there before is lost.": "原有的文件没有丢失。",
};

// Those that it puts together, or with a name or a figure in them; several may be parts of one sentence.
const PARTS = [
  [/^cannot write: permission denied$/, "无法写入：没有权限"],
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

const withParts = (text) => PARTS.reduce((sofar, [part, chinese]) => sofar.replace(part, chinese), text);

/** A word or a sentence of the server in the page's language, as far as it is known. */
export const own = (text) => (current() === "zh" ? CHINESE[text.trim()] ?? withParts(text) : text);

/** A mistake as the server says it: WHERE: WHAT; got GOT; wanted WANTED. NEXT. In Chinese as far as it is known. */
export function said(message) {
  if (current() !== "zh") return message;
  const [, where, what, got, wanted, next] = /^(?:penjing: )?(?:(.*?): )?(.*?)(?:; got (.*?))?(?:; wanted (.*?))?(?:\. (.*))?$/s.exec(message);
  return [[where && withParts(where), "", "："], [own(what), "", ""], [got, "；实际为 ", ""], [wanted && own(wanted), "；应为 ", ""], [next && own(next), "。", ""]]
    .map(([text, before, after]) => (text ? before + text + after : "")).join("");
}
