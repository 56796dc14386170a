// The words of the tab of chat.

import { addWords } from "./i18n.js";

addWords({
  chatHint: ["Each checkpoint gets a chat page of its own, on this machine only. It ends with the server of this page.", "每个检查点有自己的对话页面，只在本机可用，随本页面的服务器一起结束。"],
  chatNone: ["No run here has a checkpoint yet. Train a first model in the tab Runs, or your own in the tab Train.", "这里还没有带检查点的运行。请在“运行”页训练第一个模型，或在“训练”页训练自己的。"],
  chatRun: ["Run", "运行"],
  chatStart: ["Load it", "加载"],
  chatOpen: ["Open the chat", "打开对话"],
  chat_starting: ["Loading the model…", "正在加载模型…"],
  chat_ended: ["It ended.", "已结束。"],
  chatBlind: ["Blind comparison", "盲测对比"],
  chatBlindHint: ["Two loaded checkpoints answer in a random order; you see which was which after your vote. Votes are kept in votes.jsonl.", "两个已加载的检查点以随机顺序回答同一个问题；投票之后才显示名称。投票保存在 votes.jsonl 中。"],
  chatBlindNeeds: ["Load two checkpoints to compare them.", "加载两个检查点后即可对比。"],
  chatFirst: ["One checkpoint", "第一个检查点"],
  chatSecond: ["Another checkpoint", "第二个检查点"],
  chatQuestion: ["Question, or the beginning of a text", "问题，或一段文字的开头"],
  chatAsk: ["Ask both", "同时提问"],
  chatAnswering: ["Both are writing…", "两个模型正在写…"],
  chatVote_a: ["A better", "A 更好"],
  chatVote_b: ["B better", "B 更好"],
  chatVote_tie: ["Tie", "平局"],
  chatVote_bad: ["Both bad", "都不好"],
  chatKeys: ["Keys 1 to 4", "按键 1 至 4"],
  chatWas: ["{side} was {name}", "{side} 是 {name}"],
  chatStanding: ["Strength by your votes", "按投票得出的强度"],
  chatStandingHint: ["Bradley-Terry log-strength, with its 95 % interval. A difference of 1 is 73 % of the votes; ties, and both bad, count half for each.", "Bradley-Terry 对数强度及 95 % 置信区间。相差 1 表示赢得 73 % 的票；平局与都不好各算半票。"],
  chatStrength: ["strength", "强度"],
  chatInterval: ["95 % interval", "95 % 区间"],
  chatWon: ["won", "胜"],
  chatTied: ["tied", "平"],
  chatLost: ["lost", "负"],
});
